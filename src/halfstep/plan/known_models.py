"""Models that a user can name without having their files. The keys are those of each one's own `config.json`."""

from __future__ import annotations

from typing import Any


def _llama(hidden: int, layers: int, heads: int, ffn: int, vocab: int = 32000, kv_heads: int | None = None, **more: Any) -> Any:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        **more,
    }


def _gpt2(width: int, layers: int, heads: int) -> Any:
    shape = {"n_embd": width, "n_layer": layers, "n_head": heads}
    return {"model_type": "gpt2", **shape, "n_positions": 1024, "vocab_size": 50257}


def _bert(hidden: int, layers: int, heads: int) -> Any:
    return {
        "model_type": "bert",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 512,
        "vocab_size": 30522,
    }


def _mpt(width: int, layers: int, heads: int, vocab: int = 50368) -> Any:
    return {"model_type": "mpt", "d_model": width, "n_layers": layers, "n_heads": heads, "vocab_size": vocab}


def _resnet(depths: list[int], *, bottleneck: bool) -> Any:
    widths = [256, 512, 1024, 2048] if bottleneck else [64, 128, 256, 512]
    kind = "bottleneck" if bottleneck else "basic"
    return {"model_type": "resnet", "hidden_sizes": widths, "depths": depths, "layer_type": kind, "num_labels": 1000}


def _vit(hidden: int, layers: int, heads: int) -> Any:
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {
        "model_type": "vit",
        **shape,
        "intermediate_size": 4 * hidden,
        "image_size": 224,
        "patch_size": 16,
        "num_labels": 1000,
    }


LLAMA_3_8B = _llama(4096, 32, 32, 14336, 128256, 8)
LLAMA_3_70B = _llama(8192, 80, 64, 28672, 128256, 8)
KNOWN: dict[str, dict[str, Any]] = {
    "llama-7b": _llama(4096, 32, 32, 11008),
    "llama-13b": _llama(5120, 40, 40, 13824),
    "llama-65b": _llama(8192, 80, 64, 22016),
    "llama-2-7b": _llama(4096, 32, 32, 11008),
    "llama-2-13b": _llama(5120, 40, 40, 13824),
    "llama-2-70b": _llama(8192, 80, 64, 28672, kv_heads=8),
    "llama-3-8b": LLAMA_3_8B,
    "llama-3-70b": LLAMA_3_70B,
    "llama-3.1-8b": LLAMA_3_8B,
    "llama-3.1-70b": LLAMA_3_70B,
    "llama-3.1-405b": _llama(16384, 126, 128, 53248, 128256, 8),
    "llama-3.2-1b": _llama(2048, 16, 32, 8192, 128256, 8, tie_word_embeddings=True),
    "llama-3.2-3b": _llama(3072, 28, 24, 8192, 128256, 8, tie_word_embeddings=True),
    "tinyllama-1.1b": _llama(2048, 22, 32, 5632, kv_heads=4),
    "mistral-7b": _llama(4096, 32, 32, 14336, kv_heads=8) | {"model_type": "mistral"},
    "mixtral-8x7b": _llama(4096, 32, 32, 14336, kv_heads=8, num_local_experts=8, num_experts_per_tok=2)
    | {"model_type": "mixtral"},
    "qwen2.5-7b": _llama(3584, 28, 28, 18944, 152064, 4) | {"model_type": "qwen2"},
    "qwen3-8b": _llama(4096, 36, 32, 12288, 151936, 8) | {"model_type": "qwen3", "head_dim": 128},
    "qwen3-32b": _llama(5120, 64, 64, 25600, 151936, 8) | {"model_type": "qwen3", "head_dim": 128},
    "gemma-2b": _llama(2048, 18, 8, 16384, 256000, 1) | {"model_type": "gemma", "head_dim": 256},
    "gemma-7b": _llama(3072, 28, 16, 24576, 256000) | {"model_type": "gemma", "head_dim": 256},
    "phi-3-mini": _llama(3072, 32, 32, 8192, 32064) | {"model_type": "phi3"},
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "mpt-7b": _mpt(4096, 32, 32, 50432),
    "mpt-30b": _mpt(7168, 48, 64, 50432),
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    "resnet18": _resnet([2, 2, 2, 2], bottleneck=False),
    "resnet34": _resnet([3, 4, 6, 3], bottleneck=False),
    "resnet50": _resnet([3, 4, 6, 3], bottleneck=True),
    "resnet101": _resnet([3, 4, 23, 3], bottleneck=True),
    "resnet152": _resnet([3, 8, 36, 3], bottleneck=True),
    "vit-base": _vit(768, 12, 12),
    "vit-large": _vit(1024, 24, 16),
}
"""Name to configuration."""

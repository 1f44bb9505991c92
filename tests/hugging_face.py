"""Tiny models, tokenizers and data in Hugging Face's own formats, made where they are needed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = ("good", "great", "fine", "bad", "poor", "dull", "the", "film", "was", "very", "not", "a", "story", "plot")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
KINDS = {"circle": (200, 40), "square": (40, 200)}
"""Classes of pictures, and the red and blue of each."""


def byte_tokenizer(folder: Path, **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes that knows chats."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", **special)
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return fast


def word_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A tokenizer of BERT's kind, of few words."""
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *WORDS))}
    made = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    names = {f"{name[1:-1].lower()}_token": name for name in SPECIAL}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **names)
    fast.save_pretrained(folder)
    return fast


def saved(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model, once it is in the folder."""
    model.save_pretrained(folder)
    return model


def llama(folder: Path, **changed: Any) -> PreTrainedModel:
    """A LLaMA with a tokenizer of bytes."""
    tokenizer = byte_tokenizer(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, **{**sizes, **changed})
    return saved(LlamaForCausalLM(config), folder)


def gpt2(folder: Path) -> PreTrainedModel:
    """A GPT-2 with a tokenizer of bytes."""
    size = len(byte_tokenizer(folder))
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=size, n_embd=16, n_layer=1, n_head=2, n_positions=128, bos_token_id=256, eos_token_id=256)
    return saved(GPT2LMHeadModel(config), folder)


def bert(folder: Path) -> PreTrainedModel:
    """A BERT without dropout, with a tokenizer of words."""
    size = len(word_tokenizer(folder))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return saved(BertForMaskedLM(config), folder)


def vit(folder: Path) -> PreTrainedModel:
    """A ViT that tells five other classes apart, with its image processor."""
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        num_labels=5,
    )
    return saved(ViTForImageClassification(config), folder)


def resnet(folder: Path) -> PreTrainedModel:
    """A ResNet with its image processor."""
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=2)
    return saved(ResNetForImageClassification(config), folder)


def lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """The rows as JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def reviews(number: int = 60) -> list[dict[str, Any]]:
    """Sentences with what they say; one word decides."""
    good, bad = WORDS[:3], WORDS[3:6]
    return [
        {"text": f"the film was {'very ' * (each % 3)}{(bad, good)[each % 2][each % 3]}", "label": ("bad", "good")[each % 2]}
        for each in range(number)
    ]


def chats(number: int = 40) -> list[dict[str, Any]]:
    """Questions and their answers."""
    return [
        {"messages": [{"role": "user", "content": f"{each} + 1 = ?"}, {"role": "assistant", "content": str(each + 1)}]}
        for each in range(number)
    ]


def pictures(folder: Path, number: int = 12, side: int = 20) -> Path:
    """A folder of pictures for each class, told apart by their colour."""
    random = np.random.default_rng(0)
    for kind, (red, blue) in KINDS.items():
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for each in range(number):
            pixels = random.integers(0, 40, (side + each % 3, side, 3), dtype=np.uint8)
            pixels[..., 0] += red
            pixels[..., 2] += blue
            Image.fromarray(pixels).save(folder / kind / f"{each}.png")
    return folder

"""What a plan needs to know of a model: shapes, from a Hugging Face configuration, and the parameters that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any

from halfstep.errors import ModelError
from halfstep.plan.convnet import Convnet, classes_of


class Norm(str, Enum):
    """How a block normalises."""

    RMS = "rms"
    """A weight, no bias; written out in FP32, so that backward needs an FP32 copy of its input."""
    LAYER = "layer"
    """A kernel with weight and bias."""
    BARE_LAYER = "bare layer"
    """A kernel with a weight alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a family of models fixes in code rather than in its configuration.

    Attributes:
        norm: the kind of normalisation.
        gated: whether the MLP has a gate beside its first product (SwiGLU, GeGLU).
        qkv_bias: whether query, key and value have a bias.
        bias: whether the other products of a block have one.
        parallel: whether attention and MLP read the same normalised input.
        norms: how many normalisations a block has.
        head_norms: whether queries and keys are normalised a head.
        positions: whether positions are learned, and how many there are beyond those that the configuration says.
        merged: whether one product makes query, key and value, so that the value keeps them all alive.
        tied: whether embedding and head share their weights unless the configuration says otherwise.
        activation_copies: copies of its input that the MLP's activation keeps: 1 for a kernel, 5 for GELU written out.
        dropouts: how often a block drops parts of the residual stream, and so keeps a mask.
        encoder: whether it sees both sides, and its head is BERT's: a product, a normalisation, a bias a token.
        images: whether it cuts images into patches instead of embedding tokens.
    """

    norm: Norm = Norm.RMS
    gated: bool = True
    qkv_bias: bool = False
    bias: bool = False
    parallel: bool = False
    norms: int = 2
    head_norms: bool = False
    positions: int | None = None
    merged: bool = False
    tied: bool = False
    activation_copies: int = 1
    dropouts: int = 0
    encoder: bool = False
    images: bool = False


LLAMA = Traits()
GPT = {"norm": Norm.LAYER, "gated": False}
BERT = Traits(norm=Norm.LAYER, gated=False, qkv_bias=True, bias=True, positions=0, tied=True, dropouts=2, encoder=True)
FAMILIES: dict[str, Traits] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "qwen2": Traits(qkv_bias=True),
    "qwen3": Traits(head_norms=True),
    "gemma": Traits(tied=True),
    "gemma2": Traits(tied=True, norms=4),
    "phi3": Traits(merged=True),
    "gpt2": Traits(**GPT, qkv_bias=True, bias=True, positions=0, merged=True, tied=True, activation_copies=5, dropouts=2),  # type: ignore[arg-type]
    "gpt_neox": Traits(**GPT, qkv_bias=True, bias=True, parallel=True, merged=True),  # type: ignore[arg-type]
    "phi": Traits(**GPT, qkv_bias=True, bias=True, parallel=True, norms=1, activation_copies=5),  # type: ignore[arg-type]
    "falcon": Traits(**GPT, parallel=True, norms=1, merged=True, tied=True),  # type: ignore[arg-type]
    "mpt": Traits(norm=Norm.BARE_LAYER, gated=False, merged=True, tied=True),
    "opt": Traits(**GPT, qkv_bias=True, bias=True, positions=2, tied=True),  # type: ignore[arg-type]
    "bert": BERT,
    "roberta": BERT,
    "distilbert": BERT,
    "vit": Traits(**GPT, qkv_bias=True, bias=True, positions=1, images=True),  # type: ignore[arg-type]
}
"""The families that the closed form knows, by `model_type`. Read in transformers 5.24."""

SPELLINGS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "num_key_value_heads": ("num_kv_heads",),
    "num_local_experts": ("num_experts",),
}
"""Other names of a key in the families above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A stack of equal blocks between an embedding and a head.

    Attributes:
        name: what the user called it.
        traits: what its family fixes.
        layers: the number of blocks.
        hidden: the width of the residual stream.
        heads: attention heads.
        kv_heads: heads of key and value.
        head_size: width of a head.
        ffn: width of the MLP.
        vocab: tokens it knows; classes, for images.
        context: the most positions; `None` where it has no limit of its own.
        patch: numbers that make a patch of an image; 0 where it reads tokens.
        tied: whether embedding and head share their weights.
        experts: MLPs of a block.
        active_experts: how many of them a token goes through.
        published: the number of parameters that its maker gives, for a model whose shapes do not tell all; else `None`.
    """

    name: str
    traits: Traits
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    context: int | None = None
    patch: int = 0
    tied: bool = False
    experts: int = 1
    active_experts: int = 1
    published: int | None = None

    @property
    def unit(self) -> str:
        """What throughput counts."""
        return "images" if self.traits.images else "tokens"

    @property
    def fixed_length(self) -> int | None:
        """Tokens of a sample where nobody can choose them: an image's patches and the one that stands for its class."""
        return (self.context or 0) + 1 if self.traits.images else None

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        return not (self.traits.encoder or self.traits.images)

    @property
    def q_width(self) -> int:
        """Width of all queries together."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Width of all keys together."""
        return self.kv_heads * self.head_size

    @property
    def mlp_matrices(self) -> int:
        """Matrices of one MLP."""
        return 3 if self.traits.gated else 2

    @property
    def block_matrices(self) -> int:
        """Parameters of a block that are factors of a matrix product."""
        attention = self.hidden * (2 * self.q_width + 2 * self.kv_width)
        return attention + self.experts * self.mlp_matrices * self.hidden * self.ffn + self._router

    @property
    def active_matrices(self) -> int:
        """Those of them that one token meets."""
        idle = (self.experts - self.active_experts) * self.mlp_matrices * self.hidden * self.ffn
        return self.block_matrices - idle

    @property
    def block_parameters(self) -> int:
        """All parameters of a block."""
        traits = self.traits
        norms = traits.norms * self._norm_parameters + (2 * self.head_size if traits.head_norms else 0)
        qkv_bias = (self.q_width + 2 * self.kv_width) if traits.qkv_bias else 0
        biases = (2 * self.hidden + (self.mlp_matrices - 1) * self.ffn) if traits.bias else 0
        return self.block_matrices + norms + qkv_bias + biases

    @property
    def head_matrix(self) -> int:
        """Parameters of the product that makes the logits."""
        return self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        """All parameters, shared ones once."""
        if self.published is not None:
            return self.published
        return self.layers * self.block_parameters + self.outer_parameters

    @property
    def outer_parameters(self) -> int:
        """Parameters outside the blocks: embeddings, last normalisation, head."""
        if self.published is not None:
            return self.published - self.layers * self.block_parameters
        positions = 0 if self.traits.positions is None else self.hidden * ((self.context or 0) + self.traits.positions)
        ends = self._norm_parameters + (0 if self.tied else self.head_matrix)
        return self._inputs + positions + ends + self._bert_parts

    @property
    def _inputs(self) -> int:
        return self.hidden * (self.patch + 2) + self.vocab if self.traits.images else self.hidden * self.vocab

    @property
    def _bert_parts(self) -> int:
        """Two token types, a product and a normalisation before the head, and its bias; post-normalisation needs no last one."""
        return (2 * self.hidden + self.hidden * (self.hidden + 1) + 2 * self.hidden + self.vocab) if self.traits.encoder else 0

    @property
    def _norm_parameters(self) -> int:
        return self.hidden * (2 if self.traits.norm is Norm.LAYER else 1)

    @property
    def _router(self) -> int:
        return self.hidden * self.experts if self.experts > 1 else 0


Model = Transformer | Convnet


def from_config(config: Mapping[str, Any], name: str) -> Model:
    """The model that a Hugging Face configuration describes.

    Args:
        config: the content of a `config.json`.
        name: what the user called it, for messages.

    Raises:
        ModelError: the closed form does not know this family, or a key is missing or no number.
    """
    family = config.get("model_type")
    if family == "resnet":
        return Convnet.from_config(config, name)
    if family not in FAMILIES:
        near = get_close_matches(str(family), FAMILIES, n=1)
        hint = f"The nearest it knows is {near[0]}" if near else f"It knows {', '.join(FAMILIES)} and resnet"
        raise ModelError(f"{name} is a {family!r} model, whose shapes the closed form does not know. {hint}.")
    return _Reader(config, name).transformer(FAMILIES[family])


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads whole numbers of a configuration under any of their names."""

    config: Mapping[str, Any]
    name: str

    def transformer(self, traits: Traits) -> Transformer:
        hidden, heads = self.number("hidden_size"), self.number("num_attention_heads")
        experts = self.number("num_local_experts", 1)
        if hidden % heads and "head_dim" not in self.config:
            raise ModelError(f"{self.name}: a hidden_size of {hidden} cannot be split over {heads} heads.")
        return Transformer(
            name=self.name,
            traits=traits,
            layers=self.number("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=self._kv_heads(heads),
            head_size=self.number("head_dim", hidden // heads),
            ffn=self.number("intermediate_size", int(self.config.get("expansion_ratio", 4) * hidden)),
            vocab=self._outputs(traits),
            context=self._context(traits),
            patch=self.number("patch_size", 16) ** 2 * self.number("num_channels", 3) if traits.images else 0,
            tied=bool(self.config.get("tie_word_embeddings", traits.tied)),
            experts=experts,
            active_experts=min(experts, self.number("num_experts_per_tok", 1)),
        )

    def number(self, key: str, default: int | None = None) -> int:
        names = (key, *SPELLINGS.get(key, ()))
        value = next((self.config[name] for name in names if self.config.get(name) is not None), default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            said = "is missing" if value is None else f"is {value!r}"
            raise ModelError(f"{self.name}: `{key}` {said}: it must be a whole number above 0.")
        return value

    def _kv_heads(self, heads: int) -> int:
        if self.config.get("multi_query") and not self.config.get("new_decoder_architecture"):
            return 1
        return self.number("num_key_value_heads", heads)

    def _outputs(self, traits: Traits) -> int:
        return classes_of(self.config) if traits.images else self.number("vocab_size")

    def _context(self, traits: Traits) -> int | None:
        if traits.images:
            return (self.number("image_size", 224) // self.number("patch_size", 16)) ** 2
        return self.number("max_position_embeddings", 1 << 30) if traits.positions is not None else None

"""Published runs as models and recipes of the planner: what each row says, and what its code is known to do.

Nothing here is fitted: a field of a recipe comes from a column, from the row's notes, or from the code that made the row.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from halfstep.config.options import Attention, Precision, Sharding
from halfstep.errors import DeviceError
from halfstep.plan.accelerators import Accelerator, accelerator
from halfstep.plan.known_models import KNOWN
from halfstep.plan.memory import GIB
from halfstep.plan.model_facts import FAMILIES, Norm, Traits, Transformer, from_config
from halfstep.plan.recipe import Adapter, BaseWeights, Checkpointing, Loss, Optimizer, Recipe

TABLE = Path(__file__).with_name("published_runs.tsv")
SHAPE = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
LITGPT_PHI = Traits(norm=Norm.LAYER, gated=False, qkv_bias=True, bias=True, parallel=True, norms=1, merged=True)
TRAITS = {
    "mpt": FAMILIES["mpt"],
    "phi-1.5": LITGPT_PHI,
    "phi-2": LITGPT_PHI,
    "phi": Traits(merged=True),
    "stablelm": Traits(norm=Norm.LAYER, gated=False, qkv_bias=True, bias=True, parallel=True, merged=True),
    "pythia": FAMILIES["gpt_neox"],
    "falcon": FAMILIES["falcon"],
    "gpt-2": FAMILIES["gpt2"],
    "gemma": FAMILIES["gemma"],
    "qwen": FAMILIES["qwen3"],
    "bert": FAMILIES["bert"],
    "": FAMILIES["llama"],
}
HEAD_SIZES = {"qwen3": 128, "gemma": 256}
CHECKPOINTING = {
    "none": Checkpointing.NONE,
    "full": Checkpointing.FULL,
    "full (recipe default)": Checkpointing.FULL,
    "selective op": Checkpointing.SELECTIVE,
    "selective op (llama3_8b.toml default)": Checkpointing.SELECTIVE,
    "full+offload": Checkpointing.OFFLOAD,
}
OTHER_DEVICES = {
    "TITANRTX24GB": ("RTX 2080 Ti", 24, 1.0),
    "H100SXM96GBHBM2e500W": ("H100-SXM-80GB", 96, 500 / 700),
    "H100SXM96GB": ("H100-SXM-80GB", 96, 500 / 700),
}
"""Devices that are not sold so: the nearest that is, their GiB, and the share of its power that they have. Power goes with the
third power of the clock, and HBM2e has as much less bandwidth.
"""
CONTEXT_OF_CUDA_11 = 1.34e9
"""All kernels were loaded at once then: what transformers' page on one GPU says of its own memory."""
UNMODELLED = ("pp", "cp2", "cp4", "cp8", "sp4", "offload", "vpp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One row that the planner can be asked about.

    Attributes:
        number: its place in the table.
        source: who published it.
        model: its model.
        recipe: how it was trained, as far as it is known.
        device: what it ran on.
        peak_bytes: the memory it took; `None` where it was not told.
        tells: which memory that is: "allocated", "reserved" or "device".
        rate: tokens a second and device; `None` where it was not told.
        out_of_memory: whether it ran out.
        complete: whether all that memory depends on was told: none of it is a default.
        context_bytes: what the device's software took, where that is in the memory.
        packed: whether no token was padding.
        timed: whether all that time depends on was told.
    """

    number: int
    source: str
    model: Transformer
    recipe: Recipe
    device: Accelerator
    peak_bytes: float | None
    tells: str
    rate: float | None
    out_of_memory: bool
    complete: bool
    context_bytes: float
    packed: bool
    timed: bool


def published(path: Path = TABLE) -> Iterator[Published | str]:
    """Every row, or why the planner cannot be asked about it."""
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file, delimiter="\t")):
            cause = _cause(row)
            yield f"row {number}: {cause}" if cause else _row(number, row)


def _cause(row: dict[str, str]) -> str | None:
    if not all(row[key] for key in ("layers", "hidden", "heads", "vocab")):
        return "no shapes"
    if not row["gpu"]:
        return "no device"
    try:
        _device(row["gpu"])
    except DeviceError:
        return f"{row['gpu']} is not in the table of devices"
    words = re.findall(r"[a-z]+\d*", row["sharding"].lower())
    skipped = [word for word in words if word in UNMODELLED or re.fullmatch(r"(pp|cp|vpp|sp)([2-9]|\d\d+)", word)]
    if skipped:
        return f"{skipped[0]} is not modelled"
    if "paged" in f"{row['optimizer']} {row['notes']}".lower():
        return "an optimizer that pages its states out is not modelled"
    if "dist-opt" in row["sharding"]:
        return "Megatron's distributed optimizer is not modelled"
    return None


def _row(number: int, row: dict[str, str]) -> Published:
    recipe = _recipe(row)
    peak = float(row["peak_mem_gb"]) * 1e9 if row["peak_mem_gb"] else None
    notes, source = row["notes"], row["source"]
    told = all(row[key] for key in ("seq", "micro_batch", "n_gpus", "precision", "sharding", "act_ckpt", "optimizer", "ffn"))
    return Published(
        number=number,
        source=_family(source),
        model=_model(row),
        recipe=recipe,
        device=_device(row["gpu"]),
        peak_bytes=peak,
        tells="device" if "nvidia-smi" in notes else "reserved" if "reserved" in notes else "allocated",
        rate=float(row["tokens_per_s_per_gpu"]) if row["tokens_per_s_per_gpu"] else None,
        out_of_memory=notes.startswith("OOM"),
        complete=told and "not stated" not in notes and row["act_ckpt"] in CHECKPOINTING,
        context_bytes=CONTEXT_OF_CUDA_11,
        packed=not any(word in notes.lower() for word in ("unpacked", "padded", "baseline")),
        timed=all(row[key] for key in ("seq", "micro_batch", "n_gpus", "precision")),
    )


def _family(source: str) -> str:
    known = (
        "llm-foundry",
        "torchtitan",
        "torchtune",
        "litgpt",
        "Kempner",
        "NeMo",
        "Megatron",
        "huggingface",
        "fms",
        "stas00",
        "nanoGPT",
    )
    return next((name for name in known if name.lower() in source.lower()), source.split()[0])


def _model(row: dict[str, str]) -> Transformer:
    name = row["model"].lower()
    known = KNOWN.get(name)
    traits = next(found for key, found in TRAITS.items() if name.startswith(key))
    if "litgpt" in row["source"] and traits is FAMILIES["llama"]:
        traits = replace(traits, merged=True)
    shape = {key: int(row[key] or 0) for key in SHAPE}
    hidden, heads = shape["hidden"], shape["heads"]
    head_size = next((size for key, size in HEAD_SIZES.items() if name.startswith(key)), hidden // heads)
    ffn = shape["ffn"] or round(8 * hidden / 3)
    tied = traits.tied or (known is not None and getattr(from_config(known, name), "tied", False))
    told = float(row["params_b"]) * 1e9 if row["params_b"] else None
    if tied and told and "litgpt" in row["source"]:  # litgpt keeps embedding and head apart
        tied, told = False, told + hidden * shape["vocab"]
    return Transformer(
        name=row["model"],
        traits=traits,
        layers=shape["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=shape["kv_heads"] or heads,
        head_size=head_size,
        ffn=ffn,
        vocab=shape["vocab"],
        tied=tied or ("tied embeddings" in row["notes"] and "untied" not in row["notes"]),
        published=round(told) if told else None,
    )


def _recipe(row: dict[str, str]) -> Recipe:
    text, notes = row["precision"].lower(), row["notes"].lower()
    optimizer, source = row["optimizer"].lower(), row["source"].lower()
    techniques = _techniques(notes) if "optimization flags" in source else ""
    degrees = {kind: int(size) for kind, size in re.findall(r"(tp|fsdp|dp)(\d+)", row["sharding"].lower().replace("fsdp2(", "("))}
    gpus = int(row["n_gpus"] or degrees.get("dp") or degrees.get("fsdp") or 8)
    tensor_ranks = degrees.get("tp", 1)
    adapter = _adapter(optimizer)
    trainable = re.search(r"(\d+) trainable", optimizer)
    return Recipe(
        micro_batch=int(row["micro_batch"] or 1),
        sequence=int(row["seq"] or 2048),
        accumulation=int(row["grad_accum"] or 1),
        ranks=max(1, gpus // tensor_ranks),
        tensor_ranks=tensor_ranks,
        nodes=max(1, gpus // 8),
        precision=_precision(text, source),
        weights=_weights(text, optimizer, source),
        sharding=_sharding(row["sharding"].lower(), gpus, gathers_frozen="litgpt" in source and adapter is not None),
        checkpointing=_checkpointing(row["act_ckpt"], always=_always_checkpoints(source, gpus)),
        optimizer=Optimizer.ADAMW_8BIT if "8bit" in optimizer or "8bit" in notes else Optimizer.ADAMW,
        full_embedding_states=True,
        fused="fused=false" not in optimizer,
        step_in_backward="in bwd" in optimizer,
        adapter=adapter,
        trainable=int(trainable[1]) if trainable else 20_000_000 if adapter else None,
        attention=Attention.EAGER if row["attention"] == "eager" else Attention.SDPA,
        flash=1 if "llm-foundry" in source else 3 if row["attention"] == "te" else 2,
        gradients_stay="huggingface" in source,
        compiled=_compiled(notes, source, row["attention"]) or "compile" in techniques,
        loss=_loss(row, techniques),
        labels_samples=row["model"].lower().startswith("bert"),
        fused_loss="kempner" in source or "compile" in techniques,
        parallel_loss="kempner" not in source,
        logits_held="torchtitan" not in source,
        float_loss="litgpt" not in source,
        sync_every="kempner" not in source,
        reduce_bytes=2 if "fsdp-pure" in text else 4,
        eight_bit_products="fp8" in text or "fp4" in text,
    )


TECHNIQUES = ("packed", "compile", "chunked", "checkpointing", "optimizer-in-backward", "offload", "8-bit", "lora")
"""The rows of torchtune's table, each of which has what those before it have."""


def _techniques(notes: str) -> str:
    """All that the row named in the notes has."""
    last = max((number for number, name in enumerate(TECHNIQUES) if name in notes.partition(";")[0]), default=-1)
    return " ".join(TECHNIQUES[: last + 1])


def _loss(row: dict[str, str], techniques: str) -> Loss:
    return Loss.PARTS if "chunked cross entropy" in row["notes"].lower() or "chunked" in techniques else Loss.WHOLE


def _adapter(optimizer: str) -> Adapter | None:
    if "lora" in optimizer:
        return Adapter.LORA
    return Adapter.SCALES if "adapterv2" in optimizer else Adapter.PREFIX if "adapter" in optimizer else None


def _compiled(notes: str, source: str, attention: str) -> bool:
    """By the notes; torchtitan's logs say eager where it was; Transformer Engine fuses by hand."""
    if "eager" in notes:
        return False
    return "compile" in notes or "kempner" in source or attention == "te"


def _precision(text: str, source: str) -> Precision:
    if text == "fp32":
        return Precision.FP32
    if text.startswith("fp16"):
        return Precision.FP16
    pure = "bf16-true" in text or "params (pure)" in text or "model.to(bf16)" in text or "nf4" in text
    return Precision.BF16_PURE if pure else Precision.BF16


def _weights(text: str, optimizer: str, source: str) -> BaseWeights:
    if "nf4-dq" in text:
        return BaseWeights.NF4_DOUBLE
    if "torchtune" in source and ("nf4" in text or "qlora" in optimizer):
        return BaseWeights.NF4_TORCHAO
    return BaseWeights.NF4 if "nf4" in text or "qlora" in optimizer else BaseWeights.PLAIN


def _sharding(text: str, gpus: int, *, gathers_frozen: bool) -> Sharding:
    """FSDP of torch 2.1 leaves a unit whole after its backward where a frozen parameter is in it."""
    if gpus == 1:
        return Sharding.NONE
    if "zero2" in text or "grad_op" in text or "no-reshard" in text or gathers_frozen:
        return Sharding.ZERO2
    return Sharding.ZERO3 if re.search(r"fsdp|zero3|hsdp|dp\d|multi-gpu", text) and "ddp" not in text else Sharding.DDP


def _always_checkpoints(source: str, gpus: int) -> bool:
    """By the configurations that the rows' recipes are run with."""
    return ("litgpt" in source and gpus > 1) or "torchtune" in source


def _checkpointing(text: str, *, always: bool) -> Checkpointing:
    if always and not text:
        return Checkpointing.FULL
    if text.startswith("selective"):
        return Checkpointing.SELECTIVE
    return CHECKPOINTING.get(text, Checkpointing.NONE)


def _device(text: str) -> Accelerator:
    key = re.sub(r"[^A-Za-z0-9]", "", text)
    if key in OTHER_DEVICES:
        name, size, share = OTHER_DEVICES[key]
        near = accelerator(name)
        return replace(
            near,
            name=text,
            memory_bytes=size * GIB,
            bandwidth=near.bandwidth * share,
            tflops={kind: rate * share ** (1 / 3) for kind, rate in near.tflops.items()},
        )
    return accelerator(re.sub(r"\(.*\)|-?\d+GiB", "", text))

"""The memory of an update counted on fake tensors: the real model of transformers, the real optimizer, no memory and no time.

Everything runs on fake CPU tensors, whatever device is planned for: fake CUDA tensors end the process on a torch without CUDA.
What differs on CUDA is named in `LIMITS`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from halfstep.errors import ModelError
from halfstep.measure.storage import StorageCounter

LAYERS = (2, 3)
"""Depths that are traced: memory is a straight line in depth."""
LIMITS = (
    "as on the CPU: autocast keeps softmax and layer normalisation in low precision (on CUDA: FP32), a mask of dropout takes 4 "
    "bytes (on CUDA: 1), and dropout inside attention is off"
)
ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
PARTS = 8
EIGHT_BIT_FROM, EIGHT_BIT_BLOCK = 4096, 256
"""Numbers from which on bitsandbytes keeps states in 8 bits, and numbers that share a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedJob:
    """What is traced.

    Attributes:
        config: a Hugging Face configuration, with its `model_type`.
        precision: "fp32", "fp16", "bf16" or "bf16-pure".
        micro_batch: sequences or images.
        sequence: tokens of each.
        accumulation: whether gradients are there before the forward.
        checkpointing: "none" or "full".
        attention: "sdpa" or "eager".
        optimizer: "adamw", "adamw-8bit", "sgd", "sgd-momentum" or "lion".
        chunked_loss: whether logits are made a part at a time, where they are those of tokens.
        lora_rank: rank of adapters to train; `None` trains everything.
        lora_everywhere: whether every linear layer but the head has one; otherwise those that peft adapts by itself.
        lora_dropout: the share of their inputs that they drop.
    """

    config: Mapping[str, Any]
    precision: str
    micro_batch: int
    sequence: int
    accumulation: int = 1
    checkpointing: str = "none"
    attention: str = "sdpa"
    optimizer: str = "adamw"
    chunked_loss: bool = False
    lora_rank: int | None = None
    lora_everywhere: bool = True
    lora_dropout: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What was counted, for the whole depth.

    Attributes:
        parameters: the number of them.
        phases: the most bytes of tensors in each phase.
        layers: depths that were traced; empty where the whole model was.
        seconds: what tracing took.
        limits: what differs on the device.
    """

    parameters: int
    phases: dict[str, float]
    layers: tuple[int, ...]
    seconds: float
    limits: str = LIMITS


def trace(job: TracedJob) -> Traced:
    """Count an update in the steady state, and extend it to the depth that the configuration says.

    Raises:
        ModelError: transformers cannot build the model.
    """
    started = time.perf_counter()
    config = _config(job)
    depth = getattr(config, "num_hidden_layers", None)
    if depth is None or depth <= LAYERS[-1]:
        parameters, phases = _count(job)
        return Traced(parameters=parameters, phases=phases, layers=(), seconds=time.perf_counter() - started)
    (fewer, low), (more, high) = (_count(_with_depth(job, layers)) for layers in LAYERS)
    steps = depth - LAYERS[0]
    return Traced(
        parameters=fewer + steps * (more - fewer),
        phases={name: low[name] + steps * (high[name] - low[name]) for name in low},
        layers=LAYERS,
        seconds=time.perf_counter() - started,
    )


def _config(job: TracedJob) -> Any:
    from transformers import AutoConfig

    keys = {key: value for key, value in job.config.items() if key != "model_type"}
    try:
        return AutoConfig.for_model(job.config["model_type"], **keys)
    except Exception as error:  # its checks raise classes of their own
        raise ModelError(f"transformers cannot read this configuration: {str(error).strip().partition(chr(10))[0]}") from error


def _with_depth(job: TracedJob, layers: int) -> TracedJob:
    """Keys that list something a layer are left out, for the class to make anew."""
    whole = _config(job)
    name = whole.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    keys = {key: value for key, value in job.config.items() if key not in ("layer_types", "num_hidden_layers")}
    return replace(job, config={**keys, name: layers})


def _count(job: TracedJob) -> tuple[int, dict[str, float]]:
    """The second of two updates: the first makes the optimizer's states."""
    counter = StorageCounter()
    with FakeTensorMode(allow_non_fake_inputs=True), counter:
        model = _without_values(job)
        counter.count([*model.parameters(), *model.buffers()])
        optimizer = new_optimizer(job, model)
        inputs, labels = new_batch(job, model)
        for _ in range(2):
            marks = update(job, model, optimizer, inputs, labels, lambda: len(counter.history))
    forward, backward, step = (counter.history[start:end] for start, end in pairwise(marks))
    half = len(backward) // 2
    phases = {
        "forward and loss": forward,
        "backward, first half": backward[:half],
        "backward, second half": backward[half:],
        "optimizer step": step,
    }
    return sum(each.numel() for each in model.parameters()), {name: float(max(sizes)) for name, sizes in phases.items()}


def update(
    job: TracedJob,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: dict[str, torch.Tensor],
    labels: torch.Tensor,
    mark: Callable[[], int] = int,
) -> list[int]:
    """One micro-batch and a step, with the gradients of earlier micro-batches there if some come before.

    Returns:
        what `mark` said before the forward, the backward and the step, and after it.
    """
    optimizer.zero_grad(set_to_none=True)
    if job.accumulation > 1:
        for parameter in _trained(model):
            parameter.grad = torch.zeros_like(parameter)
    marks = [mark()]
    loss = _loss(job, model, inputs, labels)
    marks.append(mark())
    loss.backward()  # type: ignore[no-untyped-call]
    marks.append(mark())
    del loss
    optimizer.step()
    return [*marks, mark()]


def _loss(job: TracedJob, model: nn.Module, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    low = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(job.precision, torch.bfloat16)
    with torch.autocast("cpu", low, enabled=job.precision in ("fp16", "bf16")):
        if job.chunked_loss and "input_ids" in inputs:
            return _chunked_loss(model, inputs, labels)
        logits = model(**inputs).logits
        return nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def _chunked_loss(model: Any, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """The head and the loss a part at a time, computed again in the backward."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = model.base_model(**inputs).last_hidden_state.flatten(0, -2)
    head = model.get_output_embeddings()

    def part(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(head(states).float(), wanted, reduction="sum")

    pairs = zip(hidden.chunk(PARTS), labels.flatten().chunk(PARTS), strict=True)
    return torch.stack([checkpoint(part, states, wanted, use_reentrant=False) for states, wanted in pairs]).sum()


def new_model(job: TracedJob) -> nn.Module:
    """The model, with attention dropout off.

    Raises:
        ModelError: transformers cannot build it.
    """
    import transformers

    config = _config(job)
    mappings = transformers.models.auto.modeling_auto
    kind = next(
        (
            auto
            for names, auto in (
                (mappings.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForCausalLM),
                (mappings.MODEL_FOR_MASKED_LM_MAPPING_NAMES, transformers.AutoModelForMaskedLM),
                (mappings.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, transformers.AutoModelForImageClassification),
            )
            if config.model_type in names and not (auto is transformers.AutoModelForCausalLM and _is_encoder(config))
        ),
        None,
    )
    if kind is None:
        raise ModelError(f"A {config.model_type} model is neither a language model nor an image classifier: it cannot be traced.")
    config.use_cache = False
    for name in ATTENTION_DROPOUTS:
        if getattr(config, name, None) is not None:
            setattr(config, name, 0.0)
    dtype = torch.bfloat16 if job.precision == "bf16-pure" else torch.float32
    attention = {} if config.model_type == "resnet" else {"attn_implementation": job.attention}
    try:
        model: nn.Module = kind.from_config(config, dtype=dtype, **attention)
    except ValueError as error:
        raise ModelError(f"transformers cannot build it: {str(error).strip().partition(chr(10))[0]}") from error
    if job.lora_rank is not None:
        model = _with_adapters(model, job)
    model.train()
    if job.checkpointing == "full":
        newer = getattr(model, "activation_checkpointing_enable", None)  # its newer name
        enable: Any = newer or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def _without_values(job: TracedJob) -> nn.Module:
    """The model without the drawing of its weights, some ways of which ask a tensor for its values."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = new_model(job)
    whole: Any = model
    (whole.get_base_model() if job.lora_rank is not None else whole).tie_weights()
    return model


def _with_adapters(model: nn.Module, job: TracedJob) -> nn.Module:
    if find_spec("peft") is None:
        raise ModelError("tracing adapters needs peft, which is not installed: pip install 'halfstep[train]'.")
    from peft import LoraConfig, get_peft_model

    targets = "all-linear" if job.lora_everywhere else None
    settings = LoraConfig(r=job.lora_rank, lora_dropout=job.lora_dropout, target_modules=targets)
    pure = job.precision == "bf16-pure"
    with _unmoved(), _default_dtype(torch.bfloat16 if pure else torch.float32):
        adapted: nn.Module = get_peft_model(model, settings, autocast_adapter_dtype=False)
    return adapted


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _unmoved() -> Iterator[None]:
    """Fake parameters cannot be moved, and peft would move adapters to where they are, with warnings."""
    move = nn.Module.to
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.Module.to = lambda module, *_, **__: module  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.to = move  # type: ignore[method-assign]


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _is_encoder(config: Any) -> bool:
    """BERT and its kin have a causal class too, which nobody means."""
    return config.model_type in ("bert", "roberta", "distilbert", "electra", "camembert") and not config.is_decoder


def new_optimizer(job: TracedJob, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, fused."""
    if job.optimizer == "adamw":
        return torch.optim.AdamW(_trained(model), fused=True)
    if job.optimizer == "adamw-8bit":
        return _EightBitStates(_trained(model), {})
    momentum = 0.9 if job.optimizer in ("sgd-momentum", "lion") else 0.0
    return torch.optim.SGD(_trained(model), lr=1e-3, momentum=momentum, fused=True)


class _EightBitStates(torch.optim.Optimizer):
    """Keeps what AdamW of bitsandbytes keeps: two averages in bytes, with a scale a block; those of small tensors in FP32."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the states, the first time; one kernel then changes them where they lie."""
        for parameter in self.param_groups[0]["params"]:
            state, count = self.state[parameter], parameter.numel()
            if parameter.grad is None or state:
                continue
            for name in ("first", "second"):
                if count < EIGHT_BIT_FROM:
                    state[name] = torch.zeros_like(parameter, dtype=torch.float32)
                else:
                    state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
                    state[f"{name} scales"] = torch.zeros(-(-count // EIGHT_BIT_BLOCK), device=parameter.device)


def new_batch(job: TracedJob, model: nn.Module) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs and labels, of zeros."""
    config: Any = model.config
    if hasattr(config, "num_channels"):
        side = getattr(config, "image_size", 224)
        dtype = torch.bfloat16 if job.precision == "bf16-pure" else torch.float32
        images = torch.zeros(job.micro_batch, config.num_channels, side, side, dtype=dtype)
        return {"pixel_values": images}, torch.zeros(job.micro_batch, dtype=torch.long)
    tokens = torch.zeros(job.micro_batch, job.sequence, dtype=torch.long)
    return {"input_ids": tokens}, tokens

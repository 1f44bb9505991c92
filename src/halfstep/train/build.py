"""Turns a resolved run into objects. The only file that does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from halfstep.config.choice import ASKED_FOR, Choice
from halfstep.config.options import Metric, OptimizerName, Precision, SchedulerName, Tail, Task
from halfstep.config.run import OptimizerRun, Resolved, Run, SchedulerRun
from halfstep.distributed import Group
from halfstep.engine import Engine
from halfstep.engine.batch import to_device
from halfstep.engine.loss import sum_and_weight
from halfstep.errors import ConfigError, HalfstepError, ModelError
from halfstep.precision.kept import kept_precision, key_of
from halfstep.precision.select import select_precision
from halfstep.precision.untouched import untouched
from halfstep.train.adapters import freeze, trained, with_adapters
from halfstep.train.attention import name_of
from halfstep.train.averaging import averaged
from halfstep.train.compiling import compile_blocks
from halfstep.train.courses import warmup_stable_decay
from halfstep.train.evaluate import HeldOut
from halfstep.train.framed import Framed
from halfstep.train.head import choose_chunk
from halfstep.train.loading import batch_loader, choose_workers, transfer
from halfstep.train.models import load_model, new_model
from halfstep.train.opening import Opened, family_of
from halfstep.train.order import RankBatches
from halfstep.train.own import OwnSamples, own_model, told
from halfstep.train.packing import Packed, mixes_documents
from halfstep.train.padded import Padded, padding_of
from halfstep.train.reading import predicted_bytes
from halfstep.train.samples import Samples, Shape, Source
from halfstep.train.shards import is_divided, made_in_shards
from halfstep.train.tasks import look_of, loss_of, metric_of
from halfstep.train.windows import Batch

ParameterGroup = dict[str, Any]


def build_model(opened: Opened, run: Run, device: torch.device, group: Group) -> tuple[nn.Module, dict[str, Choice[Any]]]:
    """The model in FP32 on the device, whole or this rank's shards of it, and what was decided on the way.

    Fresh weights are drawn on the CPU from the run's seed, so that they do not depend on device, rank or sharding. A model of the
    user's own is made whole and is sharded by the engine. Every rank must call it.
    """
    torch.manual_seed(run.run.seed)
    if is_divided(run, group) and run.model.factory is None:
        return made_in_shards(opened, run, device, group)
    choices: dict[str, Choice[Any]] = {}
    model, fresh = _whole_model(opened, run, choices)
    if run.lora is not None:
        model = with_adapters(model, run.lora, fresh)
        choices["lora.trained"] = trained(model)
    elif run.model.frozen is not None:
        choices["model.trained"] = freeze(model, run.model.frozen)
    return model.to(device).train(), choices


def _whole_model(opened: Opened, run: Run, choices: dict[str, Choice[Any]]) -> tuple[nn.Module, Sequence[str]]:
    """The model, and the names of what starts at random though the rest does not."""
    inputs = opened.inputs
    if inputs.factory is not None:
        return own_model(inputs.factory, inputs.config or {}), ()
    assert run.model.attention is not None
    if inputs.path is None:
        return new_model(opened.model_config, run.model.attention.value, family_of(inputs)), ()
    loaded = load_model(inputs.path, opened.model_config, family_of(inputs), run.model.attention.value)
    choices["model.weights"] = loaded.choice(inputs.path)
    return loaded.model, loaded.fresh


def use_attention(model: Any, run: Run) -> None:
    """Give a built model the run's attention, where it was built with another, before its precision was known."""
    if run.model.attention is not None and name_of(run.model.attention) != model.config._attn_implementation:
        model.set_attn_implementation(name_of(run.model.attention))


def shape_of(run: Run) -> Shape:
    """How the run's data become sequences."""
    return Shape(length=run.data.sequence_length, packing=run.data.packing, too_long=run.data.too_long)


def measure_precision(model: nn.Module, train: Source, run: Run, group: Group, device: torch.device) -> Choice[Precision]:
    """The precision that is fastest for the model's own forward and backward here, as rank 0 found it, now or in an earlier run.

    What was found with code of the user's own is not kept, for the code may change. Every rank must call it.
    """
    loss, batch = loss_of(run), _first_batch(train, run, device)
    key = None if _is_own(run) else key_of(model, batch, loss, device)
    kept = group.from_first(kept_precision(key) if key is not None else None)
    if kept is not None:
        return kept
    return select_precision(model, loss, batch, device, group_broadcast=group.from_first, key=key if group.rank == 0 else None)


def _is_own(run: Run) -> bool:
    """Whether the model, its loss or the data are made by the user's own code."""
    return (run.model.factory, run.model.loss, run.data.factory) != (None, None, None)


def _first_batch(train: Source, run: Run, device: torch.device) -> Any:
    return few_batches(train, run, device, count=1, size=run.batch.micro)[0]


def few_batches(train: Source, run: Run, device: torch.device, *, count: int, size: int) -> list[Any]:
    """The first `count` micro-batches of `size` samples, in the order of the data; fewer where there are not so many."""
    samples = train.samples(shape_of(run))
    begins = range(0, min(count * size, len(samples)), size)
    return [to_device(samples.__getitems__(range(begin, min(begin + size, len(samples)))), device) for begin in begins]


def try_own(model: nn.Module, train: Source, run: Run, device: torch.device) -> None:
    """See that a model or a loss takes a batch, where one of them or the data are the user's own, before anything is written.

    Raises:
        ModelError: it does not; with what it raised, and where.
    """
    if not _is_own(run):
        return
    loss = loss_of(run)
    try:
        with untouched(model, device):
            result = loss(model, _first_batch(train, run, device))
    except HalfstepError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ModelError(f"The model or its loss fails on the first batch: {told(error)}") from error
    sum_and_weight(result)


def try_loss(model: nn.Module, run: Run, asked: int | None, *, sharded: bool) -> Choice[int]:
    """How many tokens' logits are computed at a time, tried on the model itself.

    Raises:
        ModelError: chunks were asked for, and the model cannot do without its logits.
    """
    whole = run.model.task is Task.CAUSAL_LM and run.model.loss is None and not sharded
    if whole and run.data.sequence_length is not None:
        return choose_chunk(model, micro_tokens=run.batch.micro * run.data.sequence_length, asked=asked)
    cause = "the loss is your own" if run.model.loss is not None else f'the task is "{run.model.task}"'
    cause = "the model's head is sharded" if sharded else cause
    if asked:
        raise ModelError(f"`model.loss_chunk = {asked}` cannot be: {cause}. Use 0, or leave it out.")
    return Choice(value=0, reason=f"whole logits, because {cause}")


def try_packing(model: nn.Module, opened: Opened, *, asked: bool) -> Choice[bool]:
    """Whether several documents share a sequence, tried on the model itself.

    Raises:
        ModelError: it was asked for, and the model would mix them.
    """
    cause = mixes_documents(model, opened.model.vocabulary or 256)
    if cause is not None and asked:
        raise ModelError(f"`data.packing = true` cannot be: {cause}. Use false, or leave it out.")
    if asked:
        return Choice(value=True, reason=ASKED_FOR)
    if cause is not None:
        return Choice(value=False, reason=f"documents of about one length are filled up, because {cause}")
    return Choice(value=True, reason="without padding; tried on this model: no document sees another")


def try_loading(train: Source, run: Run, device: torch.device, cores: int, asked: int | None) -> Choice[int]:
    """How many processes make batches, as making a few of them tells."""
    samples = train.samples(shape_of(run))
    batches = _batches(samples, run)
    return choose_workers(samples, batches, device=device.type, cores=cores, ranks=run.processes, asked=asked)


def data_choices(opened: Opened, run: Run) -> dict[str, Choice[Any]]:
    """How batches reach the device, what became of the documents, and how much of the sequences is padding.

    The last two are nothing where the text is one stream.
    """
    samples, fitted = opened.train.samples(shape_of(run)), opened.train.fitted(shape_of(run))
    told: dict[str, Choice[Any]] = {"data.transfer": transfer(torch.device(run.device).type, run.data.workers)}
    if not isinstance(samples, (Packed, Padded, Framed)) or fitted is None:
        return told
    padding = samples.padding if isinstance(samples, Packed) else padding_of(samples.lengths, _batches(samples, run))
    return {
        **told,
        "data.documents": Choice(value=len(fitted.documents), reason=str(fitted)),
        "data.padding": Choice(value=round(padding.share, 4), reason=str(padding)),
    }


def parameter_groups(model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
    """Trainable parameters in two groups: matrices, which decay, and norms and biases, which do not."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if parameter.dim() >= 2]
    others = [parameter for parameter in trainable if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, settings: OptimizerRun) -> tuple[torch.optim.Optimizer, Choice[bool]]:
    """The optimizer, and whether it is one fused kernel."""
    groups = parameter_groups(model, settings.weight_decay)
    make, keywords = _constructor(settings)
    if settings.name in NOT_FUSED:
        return make(groups, **keywords), Choice(value=False, reason=NOT_FUSED[settings.name])
    try:
        return make(groups, **keywords, fused=True), Choice(value=True, reason="one kernel reads each value once")
    except RuntimeError as error:
        return make(groups, **keywords), Choice(value=False, reason=str(error))


NOT_FUSED = {
    OptimizerName.ADAFACTOR: "torch's Adafactor has no fused kernel",
    OptimizerName.ADAMW_8BIT: "bitsandbytes has a kernel of its own, for one parameter at a time",
}


def _adamw_8bit(*arguments: Any, **keywords: Any) -> torch.optim.Optimizer:
    try:
        library = import_module("bitsandbytes")
    except ImportError:
        raise ConfigError(
            '`optimizer.name = "adamw-8bit"` is that of bitsandbytes, which is not installed: pip install bitsandbytes. '
            'Or use "adamw", or "adafactor", which keeps less.'
        ) from None
    optimizer: torch.optim.Optimizer = library.optim.AdamW8bit(*arguments, **keywords)
    return optimizer


def _constructor(settings: OptimizerRun) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    kind: dict[OptimizerName, Callable[..., torch.optim.Optimizer]] = {
        OptimizerName.ADAMW: torch.optim.AdamW,
        OptimizerName.ADAMW_8BIT: _adamw_8bit,
        OptimizerName.ADAM: torch.optim.Adam,
        OptimizerName.SGD: torch.optim.SGD,
        OptimizerName.ADAFACTOR: torch.optim.Adafactor,
    }
    keywords = {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "eps": settings.eps,
        "momentum": settings.momentum,
    }
    return kind[settings.name], {name: value for name, value in keywords.items() if value is not None}


def build_scheduler(optimizer: torch.optim.Optimizer, settings: SchedulerRun, planned: int | None) -> LambdaLR:
    """A scheduler that counts applied updates."""
    return LambdaLR(optimizer, course(settings, planned))


def course(settings: SchedulerRun, planned: int | None) -> Callable[[int], float]:
    """The share of the learning rate by the number of updates applied before.

    It rises in even steps to 1 over the warm-up, then goes to `final_share` at the last planned update and stays there.
    """

    def share(applied: int) -> float:
        if applied < settings.warmup_updates:
            return (applied + 1) / (settings.warmup_updates + 1)
        if planned is None or settings.name is SchedulerName.CONSTANT:
            return 1.0
        if settings.decay_updates is not None:
            return warmup_stable_decay(
                applied,
                warmup=settings.warmup_updates,
                decay=settings.decay_updates,
                planned=planned,
                final_share=settings.final_share,
            )
        span = max(1, planned - 1 - settings.warmup_updates)
        way = min(1.0, (applied - settings.warmup_updates) / span)
        fall = way if settings.name is SchedulerName.LINEAR else (1 - math.cos(math.pi * way)) / 2
        return 1.0 - fall * (1.0 - settings.final_share)

    return share


def build_average(model: nn.Module, run: Run) -> AveragedModel | None:
    """The averaged weights; `None` where none are kept."""
    return averaged(model, run.optimizer.ema_decay) if run.optimizer.ema_decay else None


def build_engine(
    model: nn.Module, resolved: Resolved, average: AveragedModel | None, train: Source
) -> tuple[Engine, dict[str, Choice[Any]]]:
    """The engine over the model, and what was decided on the way."""
    run = resolved.run
    optimizer, fused = build_optimizer(model, run.optimizer)
    loss = loss_of(run)
    engine = Engine(
        model,
        optimizer,
        loss=loss,
        scheduler=build_scheduler(optimizer, run.scheduler, resolved.planned_updates),
        precision=run.precision,
        accumulate=run.accumulate,
        clip_norm=run.optimizer.clip_norm or None,
        clip_value=run.optimizer.clip_value or None,
        ema=average,
        tail=run.batch.tail,
        sharding=run.sharding,
        checkpoint_activations=run.model.checkpoint_activations,
        evidence=Path(run.run.folder) / "evidence",
    )
    choices: dict[str, Choice[Any]] = {"optimizer.fused": fused}
    if run.model.compile:
        batch = _first_batch(train, run, engine.device)
        choices["model.compile"] = compile_blocks(model, loss, batch, engine.autocast)
    return engine, choices


def build_loader(train: Source, run: Run, group: Group, device: torch.device) -> DataLoader[Batch]:
    """The micro-batches of this rank, in the order that the seed gives."""
    samples = train.samples(shape_of(run))
    batches = _batches(samples, run, rank=group.rank, ranks=group.size)
    return batch_loader(samples, batches, device=device, workers=run.data.workers)


def _batches(samples: Samples, run: Run, *, rank: int = 0, ranks: int = 1) -> RankBatches:
    return RankBatches(
        len(samples),
        global_batch=run.batch.global_,
        micro=run.batch.micro,
        seed=run.run.seed,
        rank=rank,
        ranks=ranks,
        drop_tail=run.batch.tail is Tail.DROP,
        draws=isinstance(samples, Framed),
        lengths=samples.lengths if isinstance(samples, (Padded, Framed)) else None,
    )


def build_held_out(opened: Opened, run: Run, group: Group, engine: Engine) -> HeldOut | None:
    """The held-out data, this rank's share of them cut into micro-batches; `None` where they are not looked at."""
    if run.evaluation.every_updates == 0 or opened.held_out.num_tokens == 0:
        return None
    samples = opened.held_out.samples(shape_of(run))
    mine = range(group.rank, len(samples), group.size)
    pieces = [mine[start : start + run.batch.micro] for start in range(0, len(mine), run.batch.micro)]
    return HeldOut(
        batches=batch_loader(samples, pieces, device=engine.device, workers=run.data.workers),
        bytes_per_token=_bytes_per_token(opened, run, samples),
        look=look_of(run),
        metric=metric_of(run),
        device=engine.device,
        autocast=engine.autocast,
        group=group,
    )


def _bytes_per_token(opened: Opened, run: Run, samples: Samples) -> float | None:
    """Of the held-out text, for each token that is predicted; `None` where not all of a text is."""
    if metric_of(run) is not Metric.PERPLEXITY or isinstance(samples, (Framed, OwnSamples)):
        return None
    fitted = opened.held_out.fitted(shape_of(run))
    documents = None if fitted is None else fitted.documents
    num_bytes = opened.data.facts.evaluation_bytes if documents is None else predicted_bytes(documents, opened.tokenizer)
    return None if num_bytes is None else num_bytes / max(1, samples.num_predicted)

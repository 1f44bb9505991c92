"""Decides the optimizer, its settings, clipping, and the course of the learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.config.choice import Choice
from halfstep.config.decisions import Decisions, is_auto
from halfstep.config.facts import Facts
from halfstep.config.options import OptimizerName, SchedulerName
from halfstep.config.run import OptimizerRun, SchedulerRun
from halfstep.config.schema import OptimizerSection, SchedulerSection
from halfstep.errors import ConfigError

REFERENCE_WIDTH = 256
"""The hidden size at which the learning rates below were tried."""
FINE_TUNING_RATE = 2e-5
ADAPTER_RATE = 2e-4
UNKNOWN_WIDTH_RATE = 1e-3
MOST_WARMUP_UPDATES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class _Usual:
    """What an optimizer is usually run with, and which settings belong to it."""

    learning_rate: float
    weight_decay: float
    betas: tuple[float, float] | None = None
    eps: float | None = None
    momentum: float | None = None


USUAL = {
    OptimizerName.ADAMW: _Usual(learning_rate=2e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8),
    OptimizerName.ADAMW_8BIT: _Usual(learning_rate=2e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8),
    OptimizerName.ADAM: _Usual(learning_rate=2e-3, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8),
    OptimizerName.SGD: _Usual(learning_rate=0.1, weight_decay=0.0, momentum=0.9),
    OptimizerName.ADAFACTOR: _Usual(learning_rate=1e-2, weight_decay=0.0),
}


def decide_optimizer(
    asked: OptimizerSection, facts: Facts, decisions: Decisions, *, pretrained: bool, adapters: bool
) -> OptimizerRun:
    """The optimizer with all its settings."""
    name = decisions.default("optimizer.name", asked.name, OptimizerName.ADAMW, "the usual one for language models")
    usual = USUAL[name]
    _refuse_foreign_settings(asked, name, usual)
    reason = f"usual for {name}"
    rate = decisions.take(
        "optimizer.learning_rate",
        asked.learning_rate,
        lambda: _learning_rate(name, usual, facts.model.hidden, pretrained=pretrained, adapters=adapters),
    )
    betas = None if usual.betas is None else decisions.default("optimizer.betas", asked.betas, list(usual.betas), reason)
    return OptimizerRun(
        name=name,
        learning_rate=rate,
        weight_decay=decisions.default("optimizer.weight_decay", asked.weight_decay, usual.weight_decay, reason),
        betas=None if betas is None else (betas[0], betas[1]),
        eps=None if usual.eps is None else decisions.default("optimizer.eps", asked.eps, usual.eps, reason),
        momentum=None
        if usual.momentum is None
        else decisions.default("optimizer.momentum", asked.momentum, usual.momentum, reason),
        clip_norm=decisions.default("optimizer.clip_norm", asked.clip_norm, 1.0, "usual for language models"),
        clip_value=decisions.default("optimizer.clip_value", asked.clip_value, 0.0, "off: the norm is clipped"),
        ema_decay=decisions.default("optimizer.ema_decay", asked.ema_decay, 0.0, "off: a falling rate averages too"),
    )


def _refuse_foreign_settings(asked: OptimizerSection, name: OptimizerName, usual: _Usual) -> None:
    for setting in ("betas", "eps", "momentum"):
        if getattr(usual, setting) is None and not is_auto(getattr(asked, setting)):
            owners = " and ".join(f'"{other}"' for other, its in USUAL.items() if getattr(its, setting) is not None)
            raise ConfigError(f'`optimizer.{setting}` has no effect on "{name}": it belongs to {owners}. Leave it out.')


def _learning_rate(name: OptimizerName, usual: _Usual, hidden: int | None, *, pretrained: bool, adapters: bool) -> Choice[float]:
    if usual.betas is None:
        return Choice(value=usual.learning_rate, reason=f"usual for {name}")
    if adapters:
        return Choice(value=ADAPTER_RATE, reason="usual for adapters, which start at zero")
    if pretrained:
        return Choice(value=FINE_TUNING_RATE, reason="usual for a model that is trained already")
    if hidden is None:
        return Choice(value=UNKNOWN_WIDTH_RATE, reason=f"usual for {name} where the width is not known")
    rate = float(f"{usual.learning_rate * (REFERENCE_WIDTH / max(1, hidden)) ** 0.5:.2g}")
    reason = f"{usual.learning_rate:g} at {REFERENCE_WIDTH} hidden units, falling with the root of the width ({hidden})"
    return Choice(value=rate, reason=reason)


def decide_scheduler(asked: SchedulerSection, planned: int | None, decisions: Decisions) -> SchedulerRun:
    """The course of the learning rate over `planned` updates (`None`: nobody knows how many).

    Raises:
        ConfigError: a course that falls was asked for, and nobody knows where it ends.
    """
    name = decisions.take("scheduler.name", asked.name, lambda: _course(planned))
    if planned is None and name is not SchedulerName.CONSTANT:
        raise ConfigError(
            f'`scheduler.name = "{name}"` needs to know where the run ends, and `limits.minutes` does not say it in '
            'updates. Give `limits.updates`, `limits.epochs` or `limits.tokens` too, or use "constant".'
        )
    falls = name is not SchedulerName.CONSTANT
    warmup = decisions.take("scheduler.warmup_updates", asked.warmup_updates, lambda: _warmup(planned))
    return SchedulerRun(
        name=name,
        warmup_updates=warmup,
        decay_updates=_decay(asked, name, planned, warmup, decisions),
        final_share=decisions.default(
            "scheduler.final_share",
            asked.final_share,
            0.05 if falls else 1.0,
            "a last twentieth keeps the end from standing still" if falls else "the rate stays",
        ),
    )


def _decay(asked: SchedulerSection, name: SchedulerName, planned: int | None, warmup: int, decisions: Decisions) -> int | None:
    if name is not SchedulerName.WSD:
        if not is_auto(asked.decay_updates):
            raise ConfigError(f'`scheduler.decay_updates` has no effect on "{name}": it belongs to "wsd". Leave it out.')
        return None
    assert planned is not None
    updates = decisions.take("scheduler.decay_updates", asked.decay_updates, lambda: automatic_decay_updates(planned, warmup))
    if warmup + updates > planned:
        raise ConfigError(
            f"`scheduler.warmup_updates = {warmup}` and `scheduler.decay_updates = {updates}` are more than the run's "
            f"{planned:,} updates. Use less of either."
        )
    return updates


def automatic_decay_updates(planned: int, warmup: int) -> Choice[int]:
    """A fifth of the run, as much of it as the warm-up leaves."""
    updates = min(max(1, planned // 5), max(0, planned - warmup))
    return Choice(value=updates, reason=f"a fifth of {planned:,} updates")


def _course(planned: int | None) -> Choice[SchedulerName]:
    if planned is None:
        return Choice(value=SchedulerName.CONSTANT, reason="only the clock ends the run, so nobody knows where to fall to")
    return Choice(value=SchedulerName.COSINE, reason=f"the run ends after {planned:,} updates")


def _warmup(planned: int | None) -> Choice[int]:
    if planned is None:
        return Choice(value=MOST_WARMUP_UPDATES, reason=f"{MOST_WARMUP_UPDATES} where the end is unknown")
    updates = min(MOST_WARMUP_UPDATES, planned // 20)
    return Choice(value=updates, reason=f"a twentieth of {planned:,} updates, at most {MOST_WARMUP_UPDATES}")

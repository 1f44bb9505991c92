"""How a model should lie on several ranks, by what its states take and what memory there is: arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.config.choice import ASKED_FOR, Choice
from halfstep.config.decisions import Decisions
from halfstep.config.facts import Facts
from halfstep.config.options import OptimizerName, Precision, Sharding
from halfstep.config.run import OptimizerRun
from halfstep.errors import ConfigError

AUTO = "auto"
KEPT_VALUES = {
    OptimizerName.ADAMW: 2.0,
    OptimizerName.ADAMW_8BIT: 0.5,
    OptimizerName.ADAM: 2.0,
    OptimizerName.SGD: 1.0,
    OptimizerName.ADAFACTOR: 0.0,
}
"""What an optimizer keeps beside each FP32 parameter, in parameters; SGD with momentum."""
STATES_SHARE = 0.7
"""Of the memory at hand, what states and gradients may take under "auto": the rest is for activations and buffers."""
WHOLE_GRADIENTS_SHARE = 0.3
"""Of the memory that sharded states leave, what whole gradients may take until a window ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of what training keeps of a model, all ranks together.

    Attributes:
        parameters: its parameters, trained or frozen.
        gradients: the gradients of those that are trained.
        optimizer: what the optimizer keeps beside them.
    """

    parameters: int
    gradients: int
    optimizer: int

    def on_a_rank(self, sharding: Sharding, ranks: int) -> int:
        """Bytes on one of so many ranks, activations and buffers aside."""
        whole = self.parameters + self.gradients + self.optimizer
        if sharding in (Sharding.NONE, Sharding.DDP):
            return whole
        return whole // ranks + (self.parameters if sharding is Sharding.ZERO2 else 0)


def as_asked(asked: Sharding | str, ranks: int) -> Choice[Sharding] | None:
    """What becomes of a sharding that was asked for, or of one process in any case; None where that is still open."""
    if ranks == 1 and asked != Sharding.NONE:
        why = "" if asked == AUTO else f', so that "{asked}" has nothing to divide'
        return Choice(value=Sharding.NONE, reason=f"one process{why}")
    if ranks > 1 and asked == Sharding.NONE:
        return Choice(value=Sharding.DDP, reason=f'nothing is divided, as asked for with "none"; {ranks} ranks share the work')
    return None if asked == AUTO else Choice(value=Sharding(asked), reason=ASKED_FOR)


def decide_sharding(
    asked: Sharding | str | None,
    facts: Facts,
    decisions: Decisions,
    *,
    precision: Precision,
    optimizer: OptimizerRun,
    processes: int,
) -> Sharding:
    """How a run's model lies on its ranks.

    Raises:
        ConfigError: something else that was asked for does not go together with shards.
    """
    choice = as_asked(asked or AUTO, processes)
    if choice is None:
        memory, sharing = facts.machine.memory_bytes, facts.machine.ranks_sharing_memory
        choice = choose(_states(facts, precision, optimizer), processes, None if memory is None else memory // sharing)
    decisions.choices["sharding"] = choice
    if choice.value in (Sharding.ZERO2, Sharding.ZERO3):
        _refuse_whole_states(choice.value, optimizer)
    return choice.value


def _states(facts: Facts, precision: Precision, optimizer: OptimizerRun) -> States:
    """Of all parameters trained, with their average where one is kept."""
    size = facts.model.parameters * (2 if precision is Precision.BF16_PURE else 4)
    kept = KEPT_VALUES[optimizer.name] if optimizer.name is not OptimizerName.SGD else float(bool(optimizer.momentum))
    return States(parameters=size, gradients=size, optimizer=int((kept + bool(optimizer.ema_decay)) * size))


def _refuse_whole_states(sharding: Sharding, optimizer: OptimizerRun) -> None:
    cure = f'which `sharding = "{sharding}"` divides. Use'
    if optimizer.ema_decay:
        raise ConfigError(
            f'`optimizer.ema_decay = {optimizer.ema_decay}` averages whole weights, {cure} 0, or `sharding = "ddp"`.'
        )
    if optimizer.name is OptimizerName.ADAMW_8BIT:
        raise ConfigError(
            f'`optimizer.name = "adamw-8bit"` keeps states of whole weights, {cure} "adamw", or `sharding = "ddp"`.'
        )


def choose(states: States, ranks: int, at_hand: int | None) -> Choice[Sharding]:
    """The simplest sharding with which the states fit, and room is left for activations.

    Args:
        states: of the whole model.
        ranks: two or more.
        at_hand: bytes that a rank has for all of it; None where that is not known.
    """
    if at_hand is None:
        return Choice(value=Sharding.DDP, reason="the memory of this device is unknown, so the states are taken to fit")
    limit = int(STATES_SHARE * at_hand)
    within = f"of {_gb(at_hand)} at hand on the rank that has least, {1 - STATES_SHARE:.0%} are left for activations"
    whole = states.on_a_rank(Sharding.DDP, ranks)
    if whole <= limit:
        return Choice(value=Sharding.DDP, reason=f"weights, gradients and states of {_gb(whole)} fit on every rank: {within}")
    for sharding in (Sharding.ZERO2, Sharding.ZERO3):
        need = states.on_a_rank(sharding, ranks)
        if need <= limit:
            reason = f"{_gb(whole)} of weights, gradients and states do not fit on a rank, {_gb(need)} do: {within}"
            return Choice(value=sharding, reason=reason)
    reason = f"the least memory, and still {_gb(need)} of weights, gradients and states: {within}"
    return Choice(value=Sharding.ZERO3, reason=f"{reason}; more ranks would help")


ONCE_A_WINDOW = "once a window"
EVERY_MICRO_BATCH = "after every micro-batch"


def choose_reduction(states: States, ranks: int, at_hand: int | None) -> Choice[str]:
    """When gradients of a sharded model are reduced: until then they are whole on every rank, which takes memory."""
    if at_hand is None:
        return Choice(value=EVERY_MICRO_BATCH, reason="whole gradients would take memory, and how much there is is unknown")
    left = max(0, at_hand - states.on_a_rank(Sharding.ZERO3, ranks))
    size = f"whole gradients of {_gb(states.gradients)}, of {_gb(left)} that sharded states leave"
    if states.gradients <= WHOLE_GRADIENTS_SHARE * left:
        return Choice(value=ONCE_A_WINDOW, reason=f"there is room for {size}")
    return Choice(value=EVERY_MICRO_BATCH, reason=f"{size}, are more than {WHOLE_GRADIENTS_SHARE:.0%}")


def _gb(size: int) -> str:
    return f"{size / 1e9:,.3g} GB"

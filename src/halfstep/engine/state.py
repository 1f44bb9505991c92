"""What an engine must remember to go on, beside model, optimizer and scheduler."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from halfstep.config.choice import ASKED_FOR, Choice
from halfstep.config.options import Precision
from halfstep.engine.arithmetic import Arithmetic
from halfstep.engine.performer import Performer
from halfstep.engine.settlement import Counters
from halfstep.errors import ConfigError, DataError

VERSION = 1
KEPT = "kept on resume; then: "


def state_of(performer: Performer) -> dict[str, Any]:
    """The state as plain numbers and strings; the last update must have been settled."""
    arithmetic, settlement = performer.arithmetic, performer.settlement
    return {
        "version": VERSION,
        "precision": arithmetic.choice.value.value if arithmetic.decided else None,
        "precision_reason": arithmetic.choice.reason if arithmetic.decided else None,
        "scaler": None if arithmetic.scaler is None else arithmetic.scaler.state_dict(),
        "reference": performer.reference.value,
        "micro_batch_parts": performer.accumulation.parts,
        "updates_begun": performer.updates_begun,
        "ledger": settlement.ledger.state_dict(),
        "counters": asdict(settlement.counters),
    }


def restore(performer: Performer, state: dict[str, Any]) -> None:
    """Put a state back; the precision is kept, whatever "auto" would choose now.

    Raises:
        DataError: the state is of another version.
        ConfigError: the engine was asked for another precision.
    """
    if state.get("version") != VERSION:
        raise DataError(f"The engine state has version {state.get('version')!r}; this halfstep reads version {VERSION}.")
    if state["precision"] is not None:
        _refuse_other(performer.arithmetic, state["precision"])
        reason = KEPT + str(state["precision_reason"]).removeprefix(KEPT)
        performer.arithmetic.decide(Choice(value=Precision(state["precision"]), reason=reason))
    if performer.arithmetic.scaler is not None and state["scaler"] is not None:
        performer.arithmetic.scaler.load_state_dict(state["scaler"])
    performer.reference.value = state["reference"]
    performer.accumulation.parts = state["micro_batch_parts"]
    performer.updates_begun = state["updates_begun"]
    performer.settlement.ledger.load_state_dict(state["ledger"])
    performer.settlement.counters = Counters(**state["counters"])


def _refuse_other(arithmetic: Arithmetic, saved: str) -> None:
    """A precision that was asked for is not overridden by that of the run under way, nor the other way round."""
    if arithmetic.decided and arithmetic.choice.reason == ASKED_FOR and arithmetic.choice.value.value != saved:
        asked = arithmetic.choice.value.value
        raise ConfigError(
            f'`precision = "{asked}"` was asked for, and the checkpoint was trained in "{saved}": a resumed run keeps its '
            f'precision. Ask for "{saved}" or "auto".'
        )

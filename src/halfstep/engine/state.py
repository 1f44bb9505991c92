"""What an engine must remember to go on, beside model, optimizer and scheduler."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from halfstep.config.choice import Choice
from halfstep.config.options import Precision
from halfstep.engine.performer import Performer
from halfstep.engine.settlement import Counters
from halfstep.errors import DataError

VERSION = 1


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
    """
    if state.get("version") != VERSION:
        raise DataError(f"The engine state has version {state.get('version')!r}; this halfstep reads version {VERSION}.")
    if state["precision"] is not None:
        reason = f"kept on resume; then: {state['precision_reason']}"
        performer.arithmetic.decide(Choice(value=Precision(state["precision"]), reason=reason))
    if performer.arithmetic.scaler is not None and state["scaler"] is not None:
        performer.arithmetic.scaler.load_state_dict(state["scaler"])
    performer.reference.value = state["reference"]
    performer.accumulation.parts = state["micro_batch_parts"]
    performer.updates_begun = state["updates_begun"]
    performer.settlement.ledger.load_state_dict(state["ledger"])
    performer.settlement.counters = Counters(**state["counters"])

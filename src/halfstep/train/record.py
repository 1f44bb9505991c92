"""What is said about a run while it goes, and to whom."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

from halfstep.engine.ledger import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """One update with its place in the run.

    Attributes:
        entry: what became of it, as the ledger has it; its weight is the tokens that counted, over all ranks.
        applied: applied updates so far.
        done: how much of the run is behind it, from 0 to 1.
        lr: the learning rate that the update used, or would have used.
        seconds: wall time since the update before, evaluation and saving left out.
        elapsed_s: wall time since the start of training.
        memory_bytes: the highest use of memory so far; `None` where it is not known.
    """

    entry: Entry
    applied: int
    done: float
    lr: float
    seconds: float
    elapsed_s: float
    memory_bytes: int | None

    @property
    def tokens_per_s(self) -> float:
        """Tokens that counted over wall time."""
        return self.entry.weight / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON types."""
        values = asdict(self)
        del values["entry"], values["done"]
        return {**self.entry.to_dict(), **values, "tokens_per_s": round(self.tokens_per_s, 1)}

    def scalars(self) -> dict[str, float]:
        """What is worth a curve, by its name in a chart."""
        return {
            "train/loss": self.entry.loss,
            "train/grad_norm": self.entry.grad_norm,
            "train/loss_scale": self.entry.scale,
            "train/learning_rate": self.lr,
            "speed/tokens_per_s": self.tokens_per_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """One look at the held-out text.

    Attributes:
        update: updates so far.
        loss: the weighted mean, of language models in nats per token.
        seconds: wall time it took.
        best: whether no evaluation before was better.
        nats_per_byte: the loss per byte of text, which is comparable between tokenizers; `None` where there are no bytes.
        perplexity: e to the loss; `None` where no tokens are predicted.
        accuracy: the share of what was predicted that was right; `None` where nobody counts it.
    """

    update: int
    loss: float
    seconds: float
    best: bool
    nats_per_byte: float | None = None
    perplexity: float | None = None
    accuracy: float | None = None

    def to_text(self) -> str:
        """Its numbers in words."""
        said = [f"loss {self.loss:.3f}" + ("" if self.perplexity is None else " nats a token")]
        if self.nats_per_byte is not None:
            said.append(f"{self.nats_per_byte:.3f} nats a byte")
        if self.perplexity is not None:
            said.append(f"perplexity {self.perplexity:.2f}")
        if self.accuracy is not None:
            said.append(f"accuracy {self.accuracy:.2%}")
        return ", ".join(said)

    def scalars(self) -> dict[str, float]:
        """What is worth a curve, by its name in a chart."""
        numbers = {name: getattr(self, name) for name in ("loss", "nats_per_byte", "perplexity", "accuracy")}
        return {f"evaluation/{name}": value for name, value in numbers.items() if value is not None}


class Listener(Protocol):
    """Somebody who is told about a run while it goes: a log, a chart, a progress bar."""

    def on_update(self, record: UpdateRecord) -> None:
        """Hear of an update."""

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Hear of an evaluation."""

    def close(self) -> None:
        """Hear that nothing more will come."""

"""What every probe is: hung into a training loop, told of its updates, asked for what it found, and taken out again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.events.vocabulary import Place
from halfstep.findings.finding import Finding
from halfstep.report.parts import AnyPart


class Probe(ABC):
    """Measures one model and its optimizer while a loop that knows nothing of it trains them.

    A probe changes no number of the loop: parameters, gradients, buffers, random states and modes are, at every line of the
    script, bitwise what they would be without it. It hooks what it needs itself, through torch's public hooks, in `attach`
    and takes every hook out in `detach`. What it keeps is bounded, however many updates it sees. A GAN gets probes of its
    own for each pair of model and optimizer.

    Whoever drives a probe calls, in this order::

        probe.attach(model, optimizer, scaler)           once, before the first forward that should be seen
          probe.batch_fetched(batch, sample_ids)         where a loader hands out a micro-batch       (may be left out)
          probe.backward_begins(loss, place)             before each backward                         (may be left out)
          probe.scaled_by(scaler)                        before each step through a scaler            (may be left out)
          probe.update_ended(index)                      after each update, applied or skipped: after `optimizer.step()`, or
                                                         after `scaler.update()` where there is a scaler
        probe.findings(), probe.measurements()           at the end, and at any time before it
        probe.detach()                                   once; `findings` and `measurements` still answer after it

    An error in a probe is the probe's, never the script's: hooks are registered through `safely`, and a probe that failed is
    asked no more.

    Attributes:
        failure: the error that ended the probe, in words; empty while it is well.
    """

    failure: str = ""

    def safely(self, call: Callable[..., object]) -> Callable[..., None]:
        """`call`, whose errors end the probe and never reach the script, and whose result nobody sees."""

        def guarded(*args: Any, **kwargs: Any) -> None:
            if self.failure:
                return
            try:
                call(*args, **kwargs)
            except Exception as error:  # whatever it is: the script must not see it
                self.failure = f"{type(error).__name__}: {error}"

        return guarded

    @abstractmethod
    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Hang into a loop.

        Args:
            model: what the script calls, its DDP or FSDP2 wrapper included.
            optimizer: what steps the model's parameters.
            scaler: the loss scaler; None where the loop has none.
        """

    def batch_fetched(self, batch: Any, sample_ids: Sequence[int] | None) -> None:  # noqa: B027  # silence is the default
        """A loader handed out a micro-batch.

        Args:
            batch: what the loop got.
            sample_ids: the indices of its samples in the data set; None where the loader does not tell.
        """

    def backward_begins(self, loss: Tensor, place: Place | None) -> None:  # noqa: B027  # silence is the default
        """Backward is about to run from `loss`, whose graph is still whole; `place` is the line that calls it."""

    def scaled_by(self, scaler: torch.amp.GradScaler) -> None:  # noqa: B027  # silence is the default
        """The optimizer is about to step through this scaler, which may be another than the one that `attach` was given."""

    @abstractmethod
    def update_ended(self, index: int) -> None:
        """An update has ended; `index` counts all of them from 0, applied and skipped."""

    @abstractmethod
    def findings(self) -> list[Finding]:
        """What is wrong, as far as it was seen until now."""

    @abstractmethod
    def measurements(self) -> list[AnyPart]:
        """What was measured, for the report."""

    @abstractmethod
    def detach(self) -> None:
        """Take out every hook. Does nothing where nothing is attached."""

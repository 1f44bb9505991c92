"""Services that follow a run, each through its own library, which is loaded only when it is asked for.

Where a service is, and who may write there, its library finds out as it always does (`MLFLOW_TRACKING_URI`,
`WANDB_API_KEY`, ...). A service that fails while the run goes is said once and left alone: the run's own log is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from halfstep.config.options import LoggerName
from halfstep.errors import UsageError
from halfstep.train.record import EvaluationRecord, UpdateRecord

Say = Callable[[str], object]


class Service(Protocol):
    """One run, as a service knows it."""

    def log(self, values: Mapping[str, float], update: int) -> None:
        """Take numbers by name that belong to an update."""

    def end(self, *, failed: bool) -> None:
        """Close the run."""


class MLflow:
    """A run of MLflow, in the experiment that its environment names, with the configuration as its parameters."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._mlflow = import_module("mlflow")
        self._mlflow.start_run(run_name=folder.name)
        self._mlflow.log_params(flat(settings))

    def log(self, values: Mapping[str, float], update: int) -> None:
        """Hand the numbers over; they are sent by a thread of MLflow's."""
        self._mlflow.log_metrics(dict(values), step=update, synchronous=False)

    def end(self, *, failed: bool) -> None:
        """Send what is left, and say how the run ended."""
        self._mlflow.flush_async_logging()
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


class WandB:
    """A run of Weights & Biases, in the project that its environment names or that it infers."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        wandb = import_module("wandb")
        self._run = wandb.init(name=folder.name, dir=str(folder), config=dict(settings))

    def log(self, values: Mapping[str, float], update: int) -> None:
        """Hand the numbers over; they are sent by a process of W&B's."""
        self._run.log(dict(values), step=update)

    def end(self, *, failed: bool) -> None:
        """Send what is left, and say how the run ended."""
        self._run.finish(exit_code=int(failed))


SERVICES: Mapping[LoggerName, Callable[[Path, Mapping[str, Any]], Service]] = {
    LoggerName.MLFLOW: MLflow,
    LoggerName.WANDB: WandB,
}


class Follower:
    """Tells a service of a run as long as it listens.

    Args:
        name: what it is called.
        service: the run there.
        say: takes the sentence about its failure.
    """

    def __init__(self, name: LoggerName, service: Service, say: Say) -> None:
        self._name, self._service, self._say = name, service, say
        self._listens = True

    def on_update(self, record: UpdateRecord) -> None:
        """Tell the service of an update."""
        self._try(lambda: self._service.log(record.scalars(), record.entry.index))

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Tell the service of an evaluation."""
        self._try(lambda: self._service.log(record.scalars(), record.update))

    def close(self) -> None:
        """The service is told by `end`, which knows how the run ended."""

    def end(self, *, failed: bool) -> None:
        """Tell the service how the run ended."""
        self._try(lambda: self._service.end(failed=failed))

    def _try(self, tell: Callable[[], object]) -> None:
        if not self._listens:
            return
        try:
            tell()
        except Exception as error:  # whatever the library and the network between raise
            self._listens = False
            self._say(f"{self._name} failed and is told no more: {_first_line(error)}. The run goes on, with its own log.")


@contextmanager
def following(names: Sequence[LoggerName], folder: Path, settings: Mapping[str, Any], say: Say) -> Iterator[Sequence[Follower]]:
    """Start a run at each service, and end it as this one ends.

    Raises:
        UsageError: a library is not installed, or its service does not begin a run.
    """
    followers: list[Follower] = []
    failed = True
    try:
        for name in names:
            followers.append(Follower(name, _start(name, folder, settings), say))
        yield followers
        failed = False
    finally:
        for follower in followers:
            follower.end(failed=failed)


def require(names: Sequence[LoggerName]) -> None:
    """See that the libraries are there.

    Raises:
        UsageError: one is not installed.
    """
    for name in names:
        try:
            import_module(name)
        except ImportError:
            raise UsageError(f'`run.loggers` names "{name}", which is not installed: pip install {name}.') from None


def _start(name: LoggerName, folder: Path, settings: Mapping[str, Any]) -> Service:
    try:
        return SERVICES[name](folder, settings)
    except Exception as error:  # whatever the library and the network between raise
        raise UsageError(f'`run.loggers` names "{name}", which begins no run: {_first_line(error)}.') from error


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        found.update(flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip().partition("\n")[0] or type(error).__name__).rstrip(".")

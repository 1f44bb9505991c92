"""How the processes of a run are started: threads that do not fight over cores, and ranks through torchrun's library.

Nothing here is loaded before it is needed: what threads do while they wait is settled when torch is first imported.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from halfstep.config.choice import ASKED_FOR, Choice

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig

SECONDS_TO_SAVE = 600
"""How long ranks that were told to end may take for their update and their model; torchrun's own answer is 30."""
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLEEP_SOON = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"}
"""OpenMP's word for it, and GNU's finer one: some 50 us of waiting, as long as threads differ on a quiet machine."""


def let_waiting_threads_sleep() -> Choice[str]:
    """See that OpenMP's threads do not spin for long while they wait for each other.

    A thread that spins keeps its core from the thread that it waits for, if another program wants a core too.
    It must be called before torch is imported.
    """
    if all(os.environ.get(name) == value for name, value in SLEEP_SOON.items()):
        return _sleeping_soon()
    if any(name in os.environ for name in SLEEP_SOON):
        return Choice(value="as the environment says", reason=ASKED_FOR)
    if "torch" in sys.modules:
        return Choice(value="spinning", reason="torch was loaded before")
    os.environ.update(SLEEP_SOON)
    return _sleeping_soon()


def fix_cublas_workspace() -> None:
    """Give cuBLAS the workspace with which its results repeat bitwise; before the first matmul on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _sleeping_soon() -> Choice[str]:
    return Choice(value="sleeping soon", reason="spinning threads take the core from those that they wait for")


def launch(command: Sequence[str], *, processes: int) -> int:
    """Run `python -m halfstep COMMAND` as so many ranks: what `torchrun --nproc-per-node N -m halfstep COMMAND` does.

    The processor's cores are shared out among the ranks, unless OMP_NUM_THREADS says otherwise.

    Args:
        command: the words behind `halfstep`.
        processes: ranks to start.

    Returns:
        The exit code: that of the rank that failed first, 0 if none did.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, get_args_parser

    logging.disable(logging.CRITICAL)  # this process does nothing else, and the ranks speak for themselves
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    config, entrypoint, arguments = config_from_args(get_args_parser().parse_args(_words(command, processes)))
    _give_time_to_save(config)
    try:
        elastic_launch(config=config, entrypoint=entrypoint)(*arguments)
    except ChildFailedError as error:
        return _exit_code(error)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def python_command(words: Sequence[str], *, processes: int) -> tuple[list[str], dict[str, str]]:
    """The command `python -m WORDS`, as so many ranks of torchrun where there are several, and its environment.

    The processor's cores are shared out as `launch` does. Called in a rank, what its launcher set is left out.
    """
    known = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
    if processes == 1:
        return [sys.executable, "-m", *words], known
    known.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    many = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    return [sys.executable, "-m", *many, *words], known


def _words(command: Sequence[str], processes: int) -> list[str]:
    """What torchrun's `--standalone` stands for: a rendezvous of its own on a free port."""
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4()}"]
    return [*rendezvous, f"--nproc-per-node={processes}", "-m", "halfstep", *command]


def _give_time_to_save(config: LaunchConfig) -> None:
    if hasattr(config, "shutdown_timeout"):  # of newer torch
        config.shutdown_timeout = SECONDS_TO_SAVE


def _exit_code(error: ChildFailedError) -> int:
    """That of the rank that failed first; as a shell says it where a signal ended the rank."""
    first = min(error.failures.values(), key=lambda failure: failure.timestamp)
    return first.exitcode if first.exitcode > 0 else 128 - first.exitcode

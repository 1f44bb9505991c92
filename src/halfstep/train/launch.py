"""Starts several ranks on this machine, through torchrun's own library."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser


def launch(command: Sequence[str], *, processes: int) -> int:
    """Run `python -m halfstep COMMAND` as so many ranks: what `torchrun --nproc-per-node N -m halfstep COMMAND` does.

    Args:
        command: the words behind `halfstep`.
        processes: ranks to start.

    Returns:
        The exit code: that of the rank that failed first, 0 if none did.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    words = ["--standalone", f"--nproc-per-node={processes}", "-m", "halfstep", *command]
    config, entrypoint, arguments = config_from_args(get_args_parser().parse_args(words))
    try:
        elastic_launch(config=config, entrypoint=entrypoint)(*arguments)
    except ChildFailedError as error:
        return _exit_code(error)
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _exit_code(error: ChildFailedError) -> int:
    first = min(error.failures.values(), key=lambda failure: failure.timestamp)
    return first.exitcode if first.exitcode > 0 else 128 - first.exitcode

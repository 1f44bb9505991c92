"""Real ranks: processes with gloo between them, which run functions of a test and send back what they return.

They are forked from a server that has imported torch once, so that a pair starts in a fraction of a second.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 60.0
PRELOADED = [
    "torch",
    "torch._dynamo",
    "halfstep.engine",
    "halfstep.train.job",
    "transformers.models.llama.modeling_llama",
    "hypothesis",
    "pytest",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a function ended on one rank: what it returned, or what it raised."""

    value: Any = None
    error: str | None = None
    message: str = ""
    trace: str = ""


class RankFailedError(AssertionError):
    """A function raised on some rank, or did not end in time."""


class Ranks:
    """So many processes that wait for functions to run.

    Args:
        size: how many.
        joined: whether each function runs in a process group of its own, as if the user had made it; else in the environment
            that torchrun sets, and once only.
    """

    def __init__(self, size: int = 2, *, joined: bool = True) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        """Where they meet: here, as torchrun's store is in its agent, so that it outlives each of them."""
        pipes = [context.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in pipes]
        port = self._store.port
        self._processes = [
            context.Process(target=_serve, args=(rank, size, port, theirs, joined)) for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def start(self, work: Callable[..., Any], *args: Any) -> None:
        """Run `work(*args)` on every rank."""
        for pipe in self._pipes:
            pipe.send((work, args))

    def ends(self, timeout_s: float = TIMEOUT_S) -> list[Ended]:
        """How it ended, by rank; a rank that does not end in time makes this fail."""
        ends: dict[int, Ended] = {}
        while len(ends) < len(self._pipes):
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in ends]
            ready = wait(waiting, timeout_s)
            if not ready:
                self.kill()
                raise RankFailedError(
                    f"ranks {sorted(set(range(len(self._pipes))) - ends.keys())} did not end in {timeout_s:g} s"
                )
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = self._pipes.index(pipe)
                ends[rank] = _received(pipe)
        return [ends[rank] for rank in range(len(self._pipes))]

    def __call__(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """What `work(*args)` returns on each rank."""
        self.start(work, *args)
        ends = self.ends()
        if any(end.error for end in ends):
            self.kill()
            raise RankFailedError("\n".join(f"rank {rank}: {end.trace}" for rank, end in enumerate(ends) if end.error))
        return [end.value for end in ends]

    @property
    def alive(self) -> bool:
        """Whether another function can be run."""
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """End all processes in the ordinary way."""
        for pipe in self._pipes:
            if not pipe.closed:
                with pipe:
                    _tell_to_end(pipe)
        for process in self._processes:
            process.join(TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End what is still running, with the workers of its loaders."""
        for process in self._processes:
            assert process.pid is not None
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _tell_to_end(pipe: Connection) -> None:
    try:
        pipe.send(None)
    except BrokenPipeError:
        return


def _received(pipe: Connection) -> Ended:
    try:
        return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
    except EOFError:
        return Ended(error="ProcessEnded", message="the process ended without an answer", trace="the process ended")


def _serve(rank: int, size: int, port: int, pipe: Connection, joined: bool) -> None:
    os.setsid()  # so that all that this rank starts can be ended with it
    torch.set_num_threads(1)
    gc.freeze()  # what was imported needs no looking through after every function
    warnings.simplefilter("error")
    serve = _serve_joined if joined else _serve_once
    serve(rank, size, port, pipe)


def _serve_joined(rank: int, size: int, port: int, pipe: Connection) -> None:
    store, number = dist.TCPStore("127.0.0.1", port, is_master=False), 0
    while (order := pipe.recv()) is not None:
        number += 1
        group_store = dist.PrefixStore(f"job {number}", store)
        dist.init_process_group("gloo", store=group_store, rank=rank, world_size=size)
        _answer(pipe, *order)
        gc.collect()  # of engines that are gone: a loader's worker, being a fork, could not end their groups' threads
        dist.destroy_process_group()


def _serve_once(rank: int, size: int, port: int, pipe: Connection) -> None:
    os.environ.update(environment(rank, size, port), TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    order = pipe.recv()
    if order is not None:
        _answer(pipe, *order)


def _answer(pipe: Connection, work: Callable[..., Any], args: Sequence[Any]) -> None:
    torch.manual_seed(0)
    faulthandler.dump_traceback_later(TIMEOUT_S)
    try:
        ended = Ended(value=work(*args))
    except Exception as error:
        trace = traceback.format_exc()
        ended = Ended(error=type(error).__name__, message=str(error), trace=trace)
    faulthandler.cancel_dump_traceback_later()
    kept = io.BytesIO()
    torch.save(ended, kept)
    pipe.send_bytes(kept.getvalue())

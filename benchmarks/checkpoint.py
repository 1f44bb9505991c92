"""Checkpoints: what a save keeps training waiting, and what a resumed run is: `python -m benchmarks.checkpoint`.

The rows of `benchmarks.sharding` (an update of DDP on two ranks, memory of zero3) are among them.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

from benchmarks import checkpoint_ranks, sharding
from benchmarks.harness import Goal, Row, main, ratio_row
from benchmarks.models import Gpt, Shape, cross_entropy
from halfstep import Checkpoints, Engine
from halfstep.measure.stats import paired_ratio, summarize
from halfstep.precision.scaler import ScalerSettings

DEVICE = torch.device("cpu")
SHAPE = Shape(layers=12, width=512, heads=8, vocabulary=4096, context=64)
"""40 million parameters: 480 MB with the moments of AdamW."""
UPDATES_PER_SAVE = 50


def engine_of(shape: Shape = SHAPE) -> tuple[Engine, list[tuple[Tensor, Tensor]]]:
    """A GPT with AdamW that has made one update, and its micro-batches."""
    torch.manual_seed(0)
    model = Gpt(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine = Engine(model, optimizer, loss=cross_entropy, precision="fp32", clip_norm=1.0)
    tokens = torch.randint(shape.vocabulary, (1, shape.context + 1))
    window = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]
    engine.update(window)
    return engine, window


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def waits(quick: bool) -> Iterable[Row]:
    """Seconds that training waits for a save: ours returns when the state is copied, torch.save when it is in the file."""
    engine, window = engine_of()
    parameters = sum(p.numel() for p in engine.module.parameters())
    ours, synced, theirs, updates = [], [], [], []
    our_processor_s, their_processor_s = [], []
    with scratch() as folder, Checkpoints(folder / "ours") as checkpoints:
        for round_ in range(3 if quick else 13):
            began = time.perf_counter()
            engine.update(window)
            updates.append(time.perf_counter() - began)
            began, busy = time.perf_counter(), time.thread_time()
            checkpoints.save(engine)
            ours.append(time.perf_counter() - began)
            our_processor_s.append(time.thread_time() - busy)
            checkpoints.wait()
            synced.append(time.perf_counter() - began)
            began, busy = time.perf_counter(), time.thread_time()
            torch.save(
                {
                    "model": engine.module.state_dict(),
                    "optimizer": engine.optimizers[0].state_dict(),
                    "engine": engine.state_dict(),
                },
                folder / "theirs.pt",
            )
            theirs.append(time.perf_counter() - began)
            their_processor_s.append(time.thread_time() - busy)
            if round_ == 0:
                yield ratio_row(f"the first save of {parameters / 1e6:.0f} M parameters waits", "torch.save", ours, theirs)
                ours, synced, theirs = [], [], []
    what = f"a save of {parameters / 1e6:.0f} M parameters keeps training waiting"
    yield ratio_row(what, "torch.save", ours, theirs, goal=Goal(bound=0.25))
    busy_what = "processor time of the thread that waits"
    yield ratio_row(busy_what, "torch.save", our_processor_s[1:], their_processor_s[1:])
    yield ratio_row("until that is on the disk, synced and renamed", "torch.save", synced, theirs)
    update = summarize(updates, "s")
    share = paired_ratio(ours, [UPDATES_PER_SAVE * update.value] * len(ours))
    note = f"{summarize(ours, 's')} a save, {update} an update of one micro-batch of 64 tokens"
    yield Row(
        what="share of the run that waits for saves",
        against=f"{UPDATES_PER_SAVE} updates",
        figure=share,
        goal=Goal(bound=0.02),
        note=note,
    )


def slows(quick: bool) -> Iterable[Row]:
    """Updates while a checkpoint is written beside them, against updates without."""
    engine, window = engine_of()
    during, without, number = [], [], 1 if quick else 3
    with scratch() as folder, Checkpoints(folder) as checkpoints:
        for _ in range(1 if quick else 7):
            checkpoints.wait()
            began = time.perf_counter()
            for _ in range(number):
                engine.update(window)
            without.append(time.perf_counter() - began)
            checkpoints.save(engine)
            began = time.perf_counter()
            for _ in range(number):
                engine.update(window)
            during.append(time.perf_counter() - began)
    yield ratio_row(f"updates ({number}) while a checkpoint is written", "without", during, without)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """A data set that draws numbers, and now and then makes FP16 overflow."""

    samples: int = 22

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(16) * (300.0 if index % 4 == 0 else 1.0)


class Run:
    """A small training with dropout, in the midst of which it can be saved."""

    def __init__(self, precision: str, workers: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 16))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        scaler = ScalerSettings(init_scale=2.0**12, growth_interval=2)
        self.engine = Engine(
            self.model,
            self.optimizer,
            loss=square,
            precision=precision,
            accumulate=2,
            clip_norm=1.0,
            scaler=scaler,
            max_skips=1000,
        )
        self.loader = torch.utils.data.DataLoader(Noise(), batch_size=2, shuffle=True, num_workers=workers)

    def go(self, stop: int | None, folder: Path) -> None:
        """Go on from the last checkpoint, up to another one after update `stop` or to the end."""
        with Checkpoints(folder) as checkpoints:
            checkpoints.load(self.engine)
            for update in self.engine.updates(self.loader, epochs=3):
                if update.index == stop:
                    checkpoints.save(self.engine)
                if stop is not None and update.index > stop:
                    return

    @property
    def bits(self) -> bytes:
        """Weights and moments."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return b"".join(value.detach().numpy().tobytes() for value in [*self.model.parameters(), *moments])


def square(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    """A loss whose gradients overflow in FP16 under a large scale."""
    return model(batch).square().sum() * batch.abs().max(), len(batch)


def resumes(quick: bool) -> Iterable[Row]:
    """Bytes of weights and optimizer that differ after one resume or two, in the midst of an epoch."""
    kinds = [("fp32", 0, (4,)), ("bf16", 0, (4,)), ("fp16", 0, (4,)), ("fp16", 0, (4, 9)), ("fp32", 2, (4, 9))]
    for precision, workers, stops in kinds[: 3 if quick else None]:
        whole = Run(precision, workers, seed=0)
        with scratch() as folder:
            whole.go(None, folder / "whole")
            for seed, stop in enumerate((*stops, None)):
                run = Run(precision, workers, seed=seed)
                run.go(stop, folder / "resumed")
        differ = sum(a != b for a, b in zip(run.bits, whole.bits, strict=True))
        skipped = sum(whole.engine.ledger.causes().values())
        what = f"resume in {precision}{', 2 workers' if workers else ''}, {len(stops)} in a row: bytes that differ"
        note = f"of {len(whole.bits):,} bytes after {len(whole.engine.ledger)} updates, {skipped} skipped by overflow"
        yield Row(what=what, against="uninterrupted", figure=summarize([float(differ)], ""), goal=Goal(bound=0.0), note=note)


def ranks(quick: bool) -> Iterable[Row]:
    """Two ranks, one, and two again, against two ranks all the way: windows that hold other samples, and losses apart."""
    with scratch() as folder:
        whole = _legs(folder / "whole", [(2, 0)])
        changed = _legs(folder / "changed", [(2, 4), (1, 9), (2, 0)])
    others = sum(a[0] != b[0] for a, b in zip(whole, changed, strict=True))
    apart = max(abs(a[1] - b[1]) / abs(a[1]) for a, b in zip(whole, changed, strict=True))
    what = "2 -> 1 -> 2 ranks"
    yield Row(
        what=f"{what}: windows of other samples", against="2 ranks", figure=summarize([float(others)], ""), goal=Goal(bound=0.0)
    )
    note = f"largest of {len(whole)} updates, goal 1e-5: {'holds' if apart <= 1e-5 else 'does not hold'}"
    yield Row(what=f"{what}: loss apart, relative", against="2 ranks", figure=summarize([apart], ""), note=note)


def _legs(folder: Path, legs: list[tuple[int, int]]) -> list[tuple[list[float], float]]:
    """What was told of each update; each leg is trained by processes forked from a server that has imported torch."""
    folder.mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.checkpoint_ranks"])
    for number, (ranks, stop) in enumerate(legs):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        given = (ranks, store.port, folder, stop, number)
        processes = [context.Process(target=checkpoint_ranks.go, args=(rank, *given)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0
    told: dict[int, tuple[list[float], float]] = {}
    for path in sorted(folder.glob("*.txt")):
        for line in path.read_text().splitlines():
            index, loss, *samples = line.split()
            before = told.get(int(index), ([], 0.0))[0]
            told[int(index)] = (sorted([*before, *map(float, samples)]), float(loss))
    return [told[index] for index in sorted(told)]


BENCHMARKS = {"waits": waits, "slows": slows, "resumes": resumes, "ranks": ranks, **sharding.BENCHMARKS}

if __name__ == "__main__":
    sys.exit(main(__doc__ or "", BENCHMARKS, DEVICE))

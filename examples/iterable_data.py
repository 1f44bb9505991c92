"""Streamed data without a length, split over ranks and over the workers of each.

Lines of source text are read as a stream; nobody knows beforehand how many there are. Every worker of every rank reads the stream
and keeps each n-th line, so that each line is used exactly once an epoch. Shares come out uneven, and lines are of ragged length:
the engine weights by bytes, and a rank that runs out of lines takes part in the last windows with none.

    python examples/iterable_data.py
    python examples/iterable_data.py --files 'src/**/*.py' --workers 2 --epochs 5
    torchrun --nproc-per-node 2 examples/iterable_data.py
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from glob import glob
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from halfstep import Engine
from halfstep.distributed import local_device

CONTEXT = 4
BYTES = 256
BUFFER = 256
JSON_SOURCES = str(Path(json.__file__).parent / "*.py")

Batch = tuple[Tensor, Tensor]


class Lines(IterableDataset):
    """This worker's share of the lines of some files, shuffled within a buffer, another order in each epoch."""

    def __init__(self, files: list[str], rank: int, world_size: int) -> None:
        self.files, self.rank, self.world_size = files, rank, world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The engine calls this before each epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[bytes]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        first, step = self.rank * count + number, self.world_size * count
        order = random.Random(f"{self.epoch} {first}")
        buffer: list[bytes] = []
        for line in islice(self.all_lines(), first, None, step):
            buffer.append(line)
            if len(buffer) == BUFFER:
                yield buffer.pop(order.randrange(BUFFER))
        order.shuffle(buffer)
        yield from buffer

    def all_lines(self) -> Iterator[bytes]:
        for name in self.files:
            with open(name, "rb") as file:
                yield from file


def collate(lines: list[bytes]) -> Batch:
    """For every byte of the lines, the bytes before it and the byte itself."""
    padded = [torch.frombuffer(bytearray(bytes(CONTEXT) + line), dtype=torch.uint8) for line in lines]
    windows = torch.cat([line.unfold(0, CONTEXT + 1, 1) for line in padded]).long()
    return windows[:, :CONTEXT], windows[:, CONTEXT]


class NextByte(nn.Module):
    """Scores of the next byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(CONTEXT * width, 4 * width), nn.GELU(), nn.Linear(4 * width, BYTES))

    def forward(self, before: Tensor) -> Tensor:
        return self.layers(self.bytes(before))


def byte_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    before, following = batch
    return cross_entropy(model(before).float(), following, reduction="sum"), len(following)


def entropy(lines: Iterator[bytes]) -> tuple[int, float]:
    """Number of bytes, and nats a byte for somebody who knows only how often each occurs."""
    counts = Counter(byte for line in lines for byte in line)
    total = sum(counts.values())
    return total, -sum(n / total * math.log(n / total) for n in counts.values())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", default=JSON_SOURCES, help="pattern of text files; the json package of this Python by default")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--micro-batch", type=int, default=8, help="lines")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1, help="for each rank")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--precision", default="fp32", help="auto, fp32, fp16, bf16 or bf16-pure")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    device = local_device()
    model = NextByte(args.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
    engine = Engine(model, optimizer, loss=byte_loss, precision=args.precision, accumulate=args.accumulate)

    lines = Lines(sorted(glob(args.files, recursive=True)), engine.group.rank, engine.group.size)
    loader = DataLoader(lines, args.micro_batch, num_workers=args.workers, collate_fn=collate)
    say = print if engine.group.rank == 0 else lambda *words: None
    for update in engine.updates(loader, epochs=args.epochs):
        if update.index == 1 or update.index % 50 == 0:
            say(f"update {update.index:4d}  loss {update.loss:.3f} nats a byte  {update.weight:.0f} bytes")
    total, by_frequency = entropy(lines.all_lines())
    say(f"learned {engine.counters.weight:.0f} bytes: {args.epochs} times the {total} bytes of {len(lines.files)} files")
    say(f"loss {update.loss:.3f} nats a byte, {by_frequency:.3f} from the frequency of bytes alone")


if __name__ == "__main__":
    main()

"""A plain training loop: sequences of ragged length, so that updates are weighted by tokens.

A small transformer learns to sort digits. Sequences are padded to the longest of their micro-batch; the loss is a sum with its
number of real tokens, so that neither padding nor the way sequences fell into micro-batches changes an update. The learning rate
warms up and falls with applied updates, and an average of the weights is what is judged at the end.

    python examples/plain_loop.py
    python examples/plain_loop.py --epochs 30 --width 256 --precision bf16
    torchrun --nproc-per-node 2 examples/plain_loop.py
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from halfstep import Engine
from halfstep.distributed import local_device

PADDING = 10
IGNORED = -100
LONGEST = 12

Batch = tuple[Tensor, Tensor]


class Sorter(nn.Module):
    """For each position of a sequence of digits, scores of the digit that stands there once they are sorted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.digits = nn.Embedding(PADDING + 1, width)
        self.positions = nn.Parameter(0.1 * torch.randn(LONGEST, width))
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.scores = nn.Linear(width, 10)

    def forward(self, digits: Tensor) -> Tensor:
        hidden = self.digits(digits) + self.positions[: digits.shape[1]]
        return self.scores(self.layers(hidden, src_key_padding_mask=digits == PADDING))


def sequences(count: int, seed: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, LONGEST + 1, (count,), generator=source).tolist()
    return [torch.randint(10, (length,), generator=source) for length in lengths]


def collate(samples: list[Tensor]) -> Batch:
    digits = pad_sequence(samples, batch_first=True, padding_value=PADDING)
    answers = pad_sequence([sample.sort().values for sample in samples], batch_first=True, padding_value=IGNORED)
    return digits, answers


def token_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    digits, answers = batch
    scores = model(digits).flatten(0, 1)
    return cross_entropy(scores.float(), answers.flatten(), reduction="sum"), (answers != IGNORED).sum()


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[Tensor], engine: Engine) -> float:
    right, total = 0, 0
    model.eval()
    for digits, answers in loader:
        with engine.autocast():
            guesses = model(digits.to(engine.device)).argmax(-1).cpu()
        right += int((guesses == answers).sum())
        total += int((answers != IGNORED).sum())
    return right / total


def warmup_and_cosine(warmup: int, total: int) -> Callable[[int], float]:
    def share(update: int) -> float:
        if update < warmup:
            return (update + 1) / warmup
        return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (update - warmup) / (total - warmup)))

    return share


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=2000)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--precision", default="auto", help="auto, fp32, fp16, bf16 or bf16-pure")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    device = local_device()
    loader = DataLoader(sequences(args.sequences, seed=1), args.micro_batch, shuffle=True, collate_fn=collate)
    held_out = DataLoader(sequences(500, seed=2), 100, collate_fn=collate)

    model = Sorter(args.width).to(device)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    per_epoch = math.ceil(len(loader) / args.accumulate)
    engine = Engine(
        model,
        optimizer,
        loss=token_loss,
        scheduler=LambdaLR(optimizer, warmup_and_cosine(per_epoch // 2, per_epoch * args.epochs)),
        ema=average,
        precision=args.precision,
        accumulate=args.accumulate,
        clip_norm=1.0,
    )
    say = print if engine.group.rank == 0 else lambda *words: None
    for update in engine.updates(loader, epochs=args.epochs):
        if update.index == 1 or update.index % 50 == 0:
            say(f"update {update.index:4d}  loss {update.loss:.3f}  gradient norm {update.grad_norm:.3f}  lr {update.lr:.2e}")

    for name, choice in engine.choices.items():
        say(f"{name}: {choice.value} ({choice.reason})")
    say(f"{engine.ledger.applied} updates of {engine.counters.weight:.0f} tokens; skipped: {engine.ledger.causes() or 'none'}")
    say(f"held-out accuracy: {accuracy(average, held_out, engine):.3f} of tokens, by chance 0.1")


if __name__ == "__main__":
    main()

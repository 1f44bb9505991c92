"""A launcher and a process group of one's own, without `torchrun`.

`torch.multiprocessing` starts the ranks, each joins a process group before it makes its engine, and the engine uses the group it
finds. At the end the ranks are compared with each other, bit by bit, and with the same training in one process.

    python examples/custom_launch.py
    python examples/custom_launch.py --ranks 4 --precision bf16
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from halfstep import Engine

SAMPLES = 1001  # not a multiple of anything: the last shares are uneven


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))


def make_data() -> TensorDataset:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 8, generator=source)
    return TensorDataset(x, x.prod(dim=1, keepdim=True).tanh() + x[:, :1])


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    x, y = batch
    return mse_loss(model(x).float(), y, reduction="sum"), len(x)


def train(args: argparse.Namespace, device: torch.device, ranks: int) -> Tensor:
    """The parameters after training; the global batch is the same for any number of ranks."""
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(make_data(), batch_size=args.batch // ranks)  # shared out over the ranks by the engine
    engine = Engine(model, optimizer, loss=squares, precision=args.precision)
    losses = [update.loss for update in engine.updates(loader, epochs=args.epochs)]
    if engine.group.rank == 0:
        print(
            f"{ranks} rank(s): {len(losses)} updates, loss {losses[0]:.4f} to {losses[-1]:.4f}; {engine.choices['gradient_sync']}"
        )
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def rank_main(rank: int, args: argparse.Namespace, folder: str) -> None:
    device = torch.device("cuda", rank) if torch.cuda.device_count() >= args.ranks else torch.device("cpu")
    dist.init_process_group(
        dist.get_default_backend_for_device(device), init_method=f"file://{folder}/meet", rank=rank, world_size=args.ranks
    )
    mine = train(args, device, args.ranks)
    everyone = [torch.empty_like(mine) for _ in range(args.ranks)]
    dist.all_gather(everyone, mine)
    if rank == 0:
        torch.save([parameters.cpu() for parameters in everyone], Path(folder) / "parameters.pt")
    dist.destroy_process_group()  # last: `train` has returned, so engine and wrapper are gone


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="global")
    parser.add_argument("--precision", default="fp32", help="auto, fp32, fp16, bf16 or bf16-pure")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(args, folder), nprocs=args.ranks)
        first, *others = torch.load(Path(folder) / "parameters.pt")
    apart = max((float((first - other).abs().max()) for other in others), default=0.0)
    alone = train(args, torch.device("cpu"), ranks=1)
    print(f"largest difference between ranks: {apart:g}; from one process: {float((first - alone).abs().max()):.1e}")


if __name__ == "__main__":
    main()

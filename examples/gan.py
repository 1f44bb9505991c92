"""A GAN: two models, two optimizers, two engines, and backward called by hand in windows.

The generator turns noise into points on a ring of eight clusters, the discriminator tells them from real ones. Each engine has
its own loss scale, its own ledger and its own clipping; what the generator's loss leaves in the discriminator's gradients is
cleared when the discriminator's next window opens.

    python examples/gan.py
    python examples/gan.py --updates 10000 --width 256 --precision fp16
"""

from __future__ import annotations

import argparse
import math
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from halfstep import Engine
from halfstep.distributed import local_device

NOISE = 8
CLUSTERS = 8
SPREAD = 0.05


def centres() -> Tensor:
    angles = torch.arange(CLUSTERS) * (2 * math.pi / CLUSTERS)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def real_points(count: int) -> Tensor:
    return centres()[torch.randint(CLUSTERS, (count,))] + SPREAD * torch.randn(count, 2)


def network(inputs: int, width: int, outputs: int) -> nn.Module:
    hidden = [nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


def covered(points: Tensor) -> tuple[int, float]:
    """How many clusters hold at least a fourth of their share of the points, and the share of points near any cluster."""
    distance, nearest = torch.cdist(points, centres()).min(dim=1)
    near = nearest[distance < 5 * SPREAD]
    counts = torch.bincount(near, minlength=CLUSTERS)
    return int((counts >= len(points) / CLUSTERS / 4).sum()), len(near) / len(points)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=1, help="in each window")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--precision", default="fp32", help="auto, fp32, fp16, bf16 or bf16-pure")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    device = local_device()
    generator = network(NOISE, args.width, 2).to(device)
    discriminator = network(2, args.width, 1).to(device)

    def engine_for(model: nn.Module) -> Engine:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.99), fused=True)
        return Engine(model, optimizer, precision=args.precision, clip_norm=10.0)

    generator_engine, discriminator_engine = engine_for(generator), engine_for(discriminator)

    def noise(count: int = args.batch) -> Tensor:
        return torch.randn(count, NOISE, device=device)

    for step in range(1, args.updates + 1):
        with discriminator_engine.window() as window:
            for _ in range(args.micro_batches):
                real = real_points(args.batch).to(device)
                with window.forward():
                    with torch.no_grad():
                        fake = generator(noise())
                    on_real, on_fake = discriminator(real), discriminator(fake)
                window.backward(softplus(-on_real.float()).mean())
                window.backward(softplus(on_fake.float()).mean(), weight=0)  # the same micro-batch: counted once
        judged = window.update

        with generator_engine.window() as window:
            for _ in range(args.micro_batches):
                with window.forward():
                    on_fake = discriminator(generator(noise()))
                window.backward(softplus(-on_fake.float()).mean())
        made = window.update

        if step == 1 or step % max(1, args.updates // 5) == 0:
            with torch.no_grad():
                clusters, near = covered(generator(noise(2000)).float().cpu())
            print(
                f"update {step:5d}  discriminator {judged.loss:.3f}  generator {made.loss:.3f}  "
                f"clusters covered: {clusters} of {CLUSTERS}, {near:.0%} of points near one"
            )
    skipped = Counter(discriminator_engine.ledger.causes()) + Counter(generator_engine.ledger.causes())
    applied = discriminator_engine.ledger.applied, generator_engine.ledger.applied
    print(f"{applied[0]} and {applied[1]} updates; skipped: {dict(skipped) or 'none'}")


if __name__ == "__main__":
    main()

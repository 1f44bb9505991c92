"""WGAN-GP: a loss that holds gradients of its own.

The critic is kept near slope 1 by a penalty on the norm of its gradient with respect to its input. Under FP16 that inner gradient
must be computed under the loss scale, or it is lost to underflow, and be divided by it again, or the penalty punishes the scale:
`window.grad` does both.

    python examples/gradient_penalty.py
    python examples/gradient_penalty.py --updates 5000 --width 256 --precision fp16
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
from torch import Tensor, nn

from halfstep import Engine
from halfstep.distributed import local_device
from halfstep.engine import Window

NOISE = 8


def real_points(count: int, source: torch.Generator | None = None) -> Tensor:
    """Two half moons."""
    angle = torch.rand(count, generator=source) * torch.pi
    upper = torch.rand(count, generator=source) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    return torch.stack([x, y], dim=1) + 0.05 * torch.randn(count, 2, generator=source)


def network(inputs: int, width: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, outputs)
    )  # smooth, so that the penalty has a gradient everywhere


def sliced_distance(first: Tensor, second: Tensor, directions: int = 64) -> float:
    """Mean Wasserstein-1 distance of the two clouds seen along random directions (Bonneel et al. 2015)."""
    angle = torch.linspace(0, torch.pi, directions)
    across = torch.stack([angle.cos(), angle.sin()])
    return float(((first @ across).sort(0).values - (second @ across).sort(0).values).abs().mean())


def penalty(critic: nn.Module, window: Window, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
    """The penalty of Gulrajani et al. (2017), and the norms that it judges."""
    between = torch.lerp(real, fake, torch.rand(len(real), 1, device=real.device)).requires_grad_()
    (slope,) = window.grad(critic(between), [between])
    norms = slope.norm(dim=1)
    return (norms - 1).square().mean(), norms.detach()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=250, help="of the generator")
    parser.add_argument("--critic-updates", type=int, default=5, help="for each of the generator")
    parser.add_argument(
        "--penalty", type=float, default=0.1, help="weight; the authors take 0.1 for points in the plane, 10 for images"
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--precision", default="fp32", help="auto, fp32, fp16, bf16 or bf16-pure")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    device = local_device()
    generator = network(NOISE, args.width, 2).to(device)
    critic = network(2, args.width, 1).to(device)

    def engine_for(model: nn.Module) -> Engine:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.9), fused=True)
        return Engine(model, optimizer, precision=args.precision)

    generator_engine, critic_engine = engine_for(generator), engine_for(critic)
    reference = real_points(2000, torch.Generator().manual_seed(1))

    def noise(count: int = args.batch) -> Tensor:
        return torch.randn(count, NOISE, device=device)

    def distance() -> float:
        with torch.no_grad():
            return sliced_distance(generator(noise(len(reference))).float().cpu(), reference)

    print(f"before training: distance to the real points {distance():.3f}")
    for step in range(1, args.updates + 1):
        for _ in range(args.critic_updates):
            real = real_points(args.batch).to(device)
            with critic_engine.window() as window:
                with window.forward():
                    with torch.no_grad():
                        fake = generator(noise()).float()
                    punished, norms = penalty(critic, window, real, fake)
                    loss = critic(fake).float().mean() - critic(real).float().mean() + args.penalty * punished
                window.backward(loss)
        with generator_engine.window() as window:
            with window.forward():
                loss = -critic(generator(noise())).float().mean()
            window.backward(loss)
        if step % max(1, args.updates // 5) == 0:
            print(f"update {step:4d}  distance to the real points {distance():.3f}  mean slope of the critic {norms.mean():.2f}")
    skipped = Counter(critic_engine.ledger.causes()) + Counter(generator_engine.ledger.causes())
    print(f"{critic_engine.ledger.applied} and {generator_engine.ledger.applied} updates; skipped: {dict(skipped) or 'none'}")


if __name__ == "__main__":
    main()

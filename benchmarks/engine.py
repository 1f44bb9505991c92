"""The engine against the same loop by hand and against its peers: `python -m benchmarks.engine`.

Every row is measured here, both sides in turn in one run. With `pip install -e '.[bench]' -c constraints.txt` the peers are
measured too; without them their rows say why they are missing.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from torch import nn

from benchmarks.harness import Goal, Row, main, output_of_process, paired, ratio_row, seconds_of_process, skipped
from benchmarks.loops import LOOPS, adamw, missing
from benchmarks.models import cross_entropy, gpt, mean_square, tiny
from benchmarks.peak import KINDS, MICRO_BATCH
from halfstep._compat import accelerator_device
from halfstep.engine.finish import Finish
from halfstep.measure.clock import Work
from halfstep.measure.stats import summarize
from halfstep.precision.scaler import LossScaler, ScalerSettings

DEVICE = accelerator_device()
TINY_GOALS = {"by hand": Goal(bound=0.92), "Accelerate": Goal(bound=0.80), "Fabric": Goal(bound=0.87)}
WARMUP_UPDATES_OF_TRAIN = 2
SCALE = 2.0**16


def tiny_update(quick: bool) -> Iterable[Row]:
    """An update of a model so small that overhead is all there is, on one thread.

    Each loop has its turn for ten updates in a row: a training loop runs its own code warm.
    """
    what = "ten updates, tiny model"
    runnable = [name for name in LOOPS if missing(name) is None]
    with threads(1):
        works = {name: ten(LOOPS[name](*tiny(DEVICE), mean_square)) for name in runnable}
        seconds = paired(works, DEVICE, rounds=10 if quick else 100)
    for name, goal in TINY_GOALS.items():
        cause = missing(name)
        if cause is not None:
            yield skipped(what, name, cause, goal)
        else:
            yield ratio_row(what, name, seconds["halfstep"], seconds[name], goal=goal)
    for name in runnable[2:]:
        yield ratio_row(f"{what}, {name}", "by hand", seconds[name], seconds["by hand"])
    yield same_weights(what, runnable)


def ten(update: Work) -> Work:
    """Ten updates in a row."""

    def updates() -> None:
        for _ in range(10):
            update()

    return updates


def same_weights(what: str, names: Sequence[str]) -> Row:
    """How far the weights of the loops are apart after ten updates: they must have computed the same."""
    weights = {name: weights_after(name, num_updates=10) for name in names}
    apart = {name: (weights[name] - weights["by hand"]).abs().max().item() for name in names if name != "by hand"}
    note = ", ".join(f"{name} {distance:.1e}" for name, distance in apart.items())
    furthest = summarize([max(apart.values())], "")
    return Row(what=f"{what}: weights apart after 10", against="by hand", figure=furthest, note=note)


def weights_after(name: str, *, num_updates: int) -> torch.Tensor:
    """All weights of the tiny model after some updates."""
    model, window = tiny(DEVICE)
    update = LOOPS[name](model, window, mean_square)
    for _ in range(num_updates):
        update()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def gpt_update(quick: bool) -> Iterable[Row]:
    """An update of a GPT of 13 million parameters, window 4, with all threads."""
    micro_batch = 1 if quick else 4
    works = {name: LOOPS[name](*gpt(DEVICE, micro_batch=micro_batch), cross_entropy) for name in ("by hand", "halfstep")}
    seconds = paired(works, DEVICE, rounds=3 if quick else 21, warmup_rounds=1)
    yield ratio_row("update, GPT of 13 M", "by hand", seconds["halfstep"], seconds["by hand"], goal=Goal(bound=1.0))


def end_of_update(quick: bool) -> Iterable[Row]:
    """Norm, overflow check, clipping and AdamW on 42 million scaled FP32 gradients.

    The gradients are written anew before each, untimed: `unscale_` and clipping change them.
    """
    parameters = [nn.Parameter(torch.randn(1024, 1024, device=DEVICE) * 0.02) for _ in range(40)]
    gradients = [torch.randn_like(parameter) * SCALE * 1e-4 for parameter in parameters]
    held = [torch.empty_like(gradient) for gradient in gradients]

    def refill() -> None:
        torch._foreach_copy_(held, gradients)
        for parameter, gradient in zip(parameters, held, strict=True):
            parameter.grad = gradient

    works = {"by hand": finish_by_hand(parameters), "halfstep": finish_of_engine(parameters)}
    seconds = paired(works, DEVICE, rounds=3 if quick else 41, before=refill)
    against = "unscale_, clip_grad_norm_, step, update"
    yield ratio_row("end of update, 42 M", against, seconds["halfstep"], seconds["by hand"], goal=Goal(bound=0.62))


def finish_by_hand(parameters: list[nn.Parameter]) -> Work:
    """The end of a window in torch's AMP examples."""
    optimizer = adamw(nn.ParameterList(parameters))
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=SCALE)
    scaler.scale(torch.zeros((), device=DEVICE))  # makes the scale, as the first backward does

    def finish() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return finish


def finish_of_engine(parameters: list[nn.Parameter]) -> Work:
    """The same through the engine's own parts, as an update ends."""
    finish = Finish([adamw(nn.ParameterList(parameters))], clip_norm=1.0, clip_value=None, on_host=DEVICE.type == "cpu")
    scaler = LossScaler(ScalerSettings(init_scale=SCALE), DEVICE)

    def end() -> None:
        scale = scaler.scale.item() if finish.on_host else scaler.scale
        scaler.update(finish(1.0 / scale).skipped)

    return end


def peak_memory(quick: bool) -> Iterable[Row]:
    """The highest memory of an update of the GPT, each in a process of its own."""
    what, goal = "peak memory of an update", Goal(bound=1.0)
    tensors = peaks("tensors", runs=1, micro_batch=2 if quick else MICRO_BATCH)
    kept, recomputed = tensors["halfstep"], tensors["halfstep, checkpointed"]
    yield ratio_row(f"{what}, tensors", "by hand", kept, tensors["by hand"], goal=goal, unit="B")
    yield ratio_row(f"{what}, tensors", "itself checkpointed", kept, recomputed, goal=Goal(bound=1.0, at_most=False), unit="B")
    if quick:
        yield skipped(f"{what}, resident set", "by hand", "it takes many runs to tell a difference of a few percent")
        return
    resident = peaks("resident", runs=7, micro_batch=MICRO_BATCH)
    yield ratio_row(f"{what}, resident set", "by hand", resident["halfstep"], resident["by hand"], unit="B")


def peaks(way: str, *, runs: int, micro_batch: int) -> dict[str, list[float]]:
    """Bytes of each kind of update in each of some runs, in turn."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(runs):
        for kind in KINDS:
            found[kind].append(float(output_of_process(["-m", "benchmarks.peak", kind, way, str(micro_batch)])))
    return found


def default_train(quick: bool) -> Iterable[Row]:
    """Tokens per second of `halfstep train` without a configuration, in BF16 and in FP32."""
    what, goal = "halfstep train in bf16, tokens/s", Goal(bound=1.4, at_most=False)
    rates: dict[str, list[float]] = {"bf16": [], "fp32": []}
    for _ in range(1 if quick else 3):
        for precision, measured in rates.items():
            measured.append(tokens_per_s(precision, num_updates=3 if quick else 12))
    yield ratio_row(what, "itself in fp32", rates["bf16"], rates["fp32"], goal=goal, unit="tokens/s")


def tokens_per_s(precision: str, *, num_updates: int) -> float:
    """The median rate of a short run, its first updates left out."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        settings = {"precision": precision, "limits.updates": num_updates, "evaluation.every_updates": 0}
        chosen = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        output_of_process(["-m", "halfstep", "train", "--run", str(folder), *chosen])
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    updates: list[float] = [line["tokens_per_s"] for line in lines if line["kind"] == "update"]
    return median(updates[WARMUP_UPDATES_OF_TRAIN:])


def start_up(quick: bool) -> Iterable[Row]:
    """Seconds until `import halfstep` and `halfstep --help` are done, with the interpreter's own start."""
    processes = {
        "import halfstep": ["-c", "import halfstep"],
        "halfstep --help": ["-m", "halfstep", "--help"],
        "import torch": ["-c", "import torch"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in processes}
    for _ in range(1 if quick else 7):
        for name, arguments in processes.items():
            seconds[name].append(seconds_of_process(arguments))
    torch_s = summarize(seconds["import torch"], "s")
    for name in ("import halfstep", "halfstep --help"):
        figure, goal = summarize(seconds[name], "s"), Goal(bound=0.3)
        yield Row(what=name, against="import torch", figure=figure, goal=goal, note=f"import torch takes {torch_s}")


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute with so many threads on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


BENCHMARKS = {
    "tiny": tiny_update,
    "gpt": gpt_update,
    "finish": end_of_update,
    "memory": peak_memory,
    "train": default_train,
    "start": start_up,
}

if __name__ == "__main__":
    sys.exit(main("The engine against the loop by hand and against its peers.", BENCHMARKS, DEVICE))

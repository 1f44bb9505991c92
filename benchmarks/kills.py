"""Kills a run as often as asked, at random moments, and compares its end with that of a run that nobody killed.

`python -m benchmarks.kills --kills 200`. Each run is forked from a server that has imported torch, saves after every update, and
is killed with SIGKILL after a random time; the next one goes on from what is there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.checkpoint import Run
from halfstep import Checkpoints

EPOCHS_A_KILL = 2
"""So much longer does the run become with each kill that it does not end before the last."""
LONGEST_S = 0.4


def train(folder: Path, epochs: int, pipe: Connection) -> None:
    """Go on with the run in the folder to its end, and save after every update."""
    with Checkpoints(folder) as checkpoints:
        run = Run("fp16", workers=0, seed=1 if checkpoints.updates else 0)
        checkpoints.load(run.engine)
        pipe.send("goes on")
        for _ in run.engine.updates(run.loader, epochs=epochs):
            checkpoints.save(run.engine)
        checkpoints.wait()
    pipe.send(run.bits)


def main() -> int:
    """Kill, go on, and compare; the exit code is 1 where a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    kills = parser.parse_args().kills
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.checkpoint"])
    draw, left = random.Random(0), Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        folder, epochs = Path(place), EPOCHS_A_KILL * kills
        for number in range(kills + 1):
            ours, theirs = context.Pipe()
            process = context.Process(target=train, args=(folder, epochs, theirs))
            process.start()
            ours.recv()
            if number < kills and not ours.poll(draw.uniform(0.0, LONGEST_S)):
                process.kill()
                process.join()
                left.update("half a checkpoint" for path in folder.iterdir() if path.name.endswith((".partial", ".old")))
                continue
            bits = ours.recv()
            process.join()
            break
    whole = Run("fp16", workers=0, seed=0)
    for _ in whole.engine.updates(whole.loader, epochs=epochs):
        pass
    same = bits == whole.bits
    print(f"{number} kills, {left.total()} of which left half a checkpoint; {len(whole.engine.ledger):,} updates")
    print(f"weights and moments: {'the same bits' if same else 'DIFFERENT'} as without a kill")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

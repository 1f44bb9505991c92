"""`halfstep tune`: the fastest safe way to make the updates of your run, found by running it on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.errors import ConfigError

if TYPE_CHECKING:
    from halfstep.bench.describing import Subject
    from halfstep.bench.row import Row, Trial
    from halfstep.config.schema import Written
    from halfstep.tune.range_test import Range
    from halfstep.tune.rates import Swept
    from halfstep.tune.searching import Found, Memory
    from halfstep.tune.space import Space

FEWEST_UPDATES = 10
A_DAY_S = 86400.0
EXAMPLES = """
examples:
  halfstep tune run.toml                              writes tuned.toml, which `halfstep train` takes
  halfstep tune run.toml --processes 2                the same for two ranks
  halfstep tune run.toml --set batch.micro=auto       leaves open what the file has decided
  halfstep tune run.toml --lr                         compares learning rates as well
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="a configuration of `train`; none: its default run")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="set one key over it")
    parser.add_argument("--processes", type=int, metavar="N", help="tune for so many ranks on this machine")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="trials of each of the best few, in turn (default: 3)")
    parser.add_argument("--updates", type=int, default=6, metavar="N", help="updates timed in a trial (default: 6)")
    parser.add_argument(
        "--limit", type=float, default=60.0, metavar="SECONDS", help="a trial begins no update later (default: 60)"
    )
    parser.add_argument(
        "--margin", type=float, default=0.1, metavar="SHARE", help="of the memory at hand that must stay free (default: 0.1)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("tuned.toml"), metavar="FILE", help="where to write it (default: tuned.toml)"
    )
    parser.add_argument(
        "--lr", action="store_true", help="then a range test, and 1.0, 1.25 and 1.5 times the rate compared by short runs"
    )
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="with --lr: runs of each rate (default: 5)")
    parser.add_argument("--lr-updates", type=int, default=60, metavar="N", help="with --lr: updates of a run (default: 60)")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="what goes to stdout")


def run(args: argparse.Namespace) -> int:
    """Search and write; the table goes to stdout, what is being done to stderr."""
    _check(args)
    if args.processes is not None:
        args.settings.append(f"processes={args.processes}")
    from halfstep.config.load import load
    from halfstep.distributed.env import world

    if world().size > 1:
        raise ConfigError("`halfstep tune` starts its ranks itself: leave torchrun out, and give `--processes N`.")
    written = load(None if args.config is None else Path(args.config), args.settings)
    from halfstep.bench.benching import measure, subject_of
    from halfstep.bench.predicting import predicted_bytes
    from halfstep.tune.searching import Memory, Search
    from halfstep.tune.space import space_of

    _say("looking at what is to be tuned")
    subject = subject_of(args.config, args.settings)
    space = space_of(written, subject)
    memory = Memory(
        at_hand_bytes=subject.at_hand_bytes,
        margin=args.margin,
        predicted=lambda row: predicted_bytes(subject, [row]).get(str(row)),
    )

    def trials(rows: Sequence[Row], rounds: int) -> Mapping[Row, Sequence[Trial]]:
        return measure(
            rows,
            config=args.config,
            settings=args.settings,
            rounds=rounds,
            updates=args.updates,
            limit_s=args.limit,
            told=_say,
        )

    found = Search(space, memory, trials).run(args.rounds)
    ranges, swept = _rates(args, subject, found) if args.lr else ([], [])
    _show(args, written, subject, space, memory, found, swept, ranges)
    return 0


def _rates(args: argparse.Namespace, subject: Subject, found: Found) -> tuple[list[Range], list[Swept]]:
    """Short runs of the winner: some whose rate rises until they break, then each rate; no clock ends one before the others."""
    from halfstep.bench.benching import in_processes
    from halfstep.bench.trying import WARMUP, Task
    from halfstep.tune.range_test import RUNS, range_test
    from halfstep.tune.rates import sweep

    def once(settings: Sequence[str], rise: float | None = None) -> Trial:
        asked = [*args.settings, *settings]
        task = Task(config=args.config, settings=asked, updates=args.lr_updates - WARMUP, limit_s=A_DAY_S, rise=rise)
        return in_processes(task, found.winner.processes)

    rate = subject.learning_rate
    assert rate is not None
    runs = min(RUNS, args.seeds)
    ranges = range_test(found.winner, rate, updates=args.lr_updates, runs=runs, run=once, told=_say)
    return ranges, sweep(found.winner, rate, seeds=args.seeds, run=once, told=_say)


def _check(args: argparse.Namespace) -> None:
    for name in ("rounds", "updates", "limit", "processes", "seeds"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            raise ConfigError(f"`--{name} {getattr(args, name)}` must be above 0.")
    if args.lr_updates < FEWEST_UPDATES:
        raise ConfigError(f"`--lr-updates {args.lr_updates}` says nothing of a learning rate. Use at least {FEWEST_UPDATES}.")
    if not 0 <= args.margin < 1:
        raise ConfigError(f"`--margin {args.margin}` must be a share of the memory, at least 0 and below 1.")
    _refuse_used(args.output)


def _refuse_used(path: Path) -> None:
    if path.exists():
        raise ConfigError(f"{path} exists, and is not overwritten. Give `--output` another name.")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}.")


def _show(
    args: argparse.Namespace,
    written: Written,
    subject: Subject,
    space: Space,
    memory: Memory,
    found: Found,
    swept: Sequence[Swept],
    ranges: Sequence[Range],
) -> None:
    from halfstep.tune.range_test import conclusion as told_of
    from halfstep.tune.rates import choose
    from halfstep.tune.telling import choices_of, conclusion, config_text, to_dict, to_text

    choices = choices_of(found, space, subject)
    if swept:
        choices["optimizer.learning_rate"] = choose(swept)
    head = f"By `halfstep tune` on {subject.machine}. {conclusion(found)}"
    with args.output.open("x", encoding="utf-8") as file:
        file.write(config_text(written, choices, head))
    range_told = told_of(ranges, subject.learning_rate or 0.0) if ranges else ""
    data = to_dict(subject, found, choices, swept, ranges)
    print(
        json.dumps(data, indent=2, default=str) if args.format == "json" else to_text(subject, memory, found, swept, range_told)
    )
    _say(f"written to {args.output}, for `halfstep train {args.output}`")


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)

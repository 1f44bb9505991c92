"""`halfstep bench`: the guide's four rows, or any others, measured for your own model on this machine."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.config.options import Precision, option
from halfstep.errors import ConfigError

if TYPE_CHECKING:
    from halfstep.bench.benching import Result
    from halfstep.bench.describing import Subject
    from halfstep.bench.row import Row

ROW = re.compile(r"([\w-]+):(\d+)x(\d+)(:compile)?")
EXAMPLES = """
examples:
  halfstep bench                                   FP32, FP16, BF16, and BF16 with accumulation, of the default run
  halfstep bench run.toml --rounds 5               the same of a configuration
  halfstep bench run.toml --row bf16:16x1 --row bf16:4x4 --row bf16:16x1:compile
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="a configuration of `train`; none: its default run")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="set one key over it")
    parser.add_argument(
        "--row",
        action="append",
        default=[],
        metavar="PRECISION:MICROxACCUMULATE[:compile]",
        help="a row instead of the usual four; may be repeated, the first is what the others are compared with",
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="trials of each row, in turn (default: 3)")
    parser.add_argument("--updates", type=int, default=6, metavar="N", help="updates timed in a trial (default: 6)")
    parser.add_argument(
        "--limit", type=float, default=60.0, metavar="SECONDS", help="a trial begins no update later (default: 60)"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="what goes to stdout")
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep bench.json and bench.html there")


def run(args: argparse.Namespace) -> int:
    """Measure; the table goes to stdout, what is being done to stderr."""
    _check(args)
    asked = [_row(text) for text in args.row]
    from halfstep.bench.benching import bench, explained, subject_of

    _say("looking at what is to be measured")
    subject = subject_of(args.config, args.settings)
    rows = asked or _usual(subject)
    can = [row for row in rows if str(row.precision) not in subject.unavailable]
    if not can:
        raise ConfigError("None of the rows can be run here: " + "; ".join(subject.unavailable.values()))
    results = bench(
        can,
        config=args.config,
        settings=args.settings,
        rounds=args.rounds,
        updates=args.updates,
        limit_s=args.limit,
        told=_say,
    )
    results = _in_order(rows, results, subject)
    why = explained(results, config=args.config, settings=args.settings, limit_s=args.limit, told=_say)
    from halfstep.bench.predicting import keep_calibration

    _say(keep_calibration(subject))
    _show(args, subject, results, why)
    return 0


def _check(args: argparse.Namespace) -> None:
    for name in ("rounds", "updates", "limit"):
        if getattr(args, name) <= 0:
            raise ConfigError(f"`--{name} {getattr(args, name)}` must be above 0.")


def _row(text: str) -> Row:
    from halfstep.bench.row import Row

    found = ROW.fullmatch(text)
    if found is None or int(found[2]) < 1 or int(found[3]) < 1:
        raise ConfigError(f"`--row {text}` is not a row: it must be PRECISION:MICROxACCUMULATE, as bf16:8x4 or bf16:8x4:compile.")
    precision = option(Precision, found[1], name="--row")
    return Row(precision=precision, micro=int(found[2]), accumulate=int(found[3]), compile=found[4] is not None)


def _usual(subject: Subject) -> list[Row]:
    from halfstep.bench.describing import usual_rows
    from halfstep.bench.row import Row

    return [Row(precision=p, micro=micro, accumulate=count) for p, micro, count in usual_rows(subject)]


def _in_order(rows: Sequence[Row], results: Sequence[Result], subject: Subject) -> list[Result]:
    """The results in the order of the rows, those that this device cannot run among them."""
    from halfstep.bench.benching import Result

    found = {result.row: result for result in results}
    return [found.get(row) or Result(row=row, failed=subject.unavailable[str(row.precision)]) for row in rows]


def _predicted(subject: Subject, results: Sequence[Result]) -> dict[str, int]:
    from halfstep.bench.predicting import predicted_bytes

    return predicted_bytes(subject, [result.row for result in results])


def _show(args: argparse.Namespace, subject: Subject, results: Sequence[Result], why: Mapping[str, Sequence[str]]) -> None:
    from halfstep.bench.told import to_dict, to_page, to_text

    predicted = _predicted(subject, results)
    data: dict[str, Any] = to_dict(subject, results, predicted, why)
    if args.save is not None:
        args.save.mkdir(parents=True, exist_ok=True)
        (args.save / "bench.json").write_text(json.dumps(data, indent=2, default=str) + "\n", encoding="utf-8")
        (args.save / "bench.html").write_text(to_page(subject, results, predicted, why), encoding="utf-8")
    print(json.dumps(data, indent=2, default=str) if args.format == "json" else to_text(subject, results, predicted, why))


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)

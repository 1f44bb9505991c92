"""`halfstep convert SCRIPT`: turns a plain FP32 loop into a right mixed-precision, accumulating, distributed loop."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from pathlib import Path

from halfstep.errors import SourceError, UsageError
from halfstep.findings.finding import Severity
from halfstep.findings.registry import Rule
from halfstep.imagine.converting.conversion import convert
from halfstep.imagine.converting.outcome import Conversion, Wish
from halfstep.imagine.project import parse
from halfstep.imagine.source import Source, decoded, rewritten
from halfstep.imagine.story import tell
from halfstep.rules.judge import judge
from halfstep.rules.settings import Settings

PRECISIONS = ("auto", "fp16", "bf16", "fp32")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("script", metavar="SCRIPT", help="the Python file that holds the loop; it is read, never run")
    parser.add_argument("--precision", default="auto", choices=PRECISIONS, help="auto: BF16 where native, else FP16; fp32: none")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro-batches in an update")
    parser.add_argument("--ddp", action="store_true", help="train on several ranks, started by torchrun")
    parser.add_argument("--engine", action="store_true", help="put the loop on halfstep.Engine")
    parser.add_argument("--diff", action="store_true", help="show what would change, and change nothing")
    parser.add_argument("--output", metavar="FILE", help="write the new file here instead of to standard output")
    parser.add_argument("--in-place", action="store_true", help="write the new file over SCRIPT")


def run(args: argparse.Namespace) -> int:
    """Convert, write the result, and say on standard error what was done and what was left."""
    _check(args)
    raw = _read(args.script)
    text = decoded(raw)
    wish = Wish(precision=args.precision, accumulate=args.accumulate, ddp=args.ddp, engine=args.engine)
    rules = Settings().rules()
    result = convert(text, args.script, wish, lambda changed: _faults(changed, args.script, rules))
    if result.text == text:
        raise UsageError(f"nothing in {args.script} was converted: {'; '.join(result.left) or 'nothing was asked for'}.")
    _write(args, raw, text, result.text)
    _say(result)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.accumulate < 1:
        raise UsageError(f"--accumulate {args.accumulate}: an update has at least 1 micro-batch. Use 1 or more.")
    if sum((bool(args.output), args.in_place, args.diff)) > 1:
        raise UsageError("--output, --in-place and --diff exclude each other. Use one of them.")
    if args.engine and args.ddp:
        raise UsageError(
            "--engine and --ddp exclude each other: under torchrun an engine joins the ranks by itself. Use one of them."
        )
    if args.script.endswith(".ipynb"):
        raise UsageError(f"{args.script} is a notebook, and only Python files are converted: save its code as one.")


def _read(script: str) -> bytes:
    try:
        return Path(script).read_bytes()
    except OSError as error:
        raise SourceError(f"{script} cannot be read: {error.strerror or error}.") from error


def _faults(text: str, path: str, rules: tuple[Rule, ...]) -> frozenset[str]:
    """Errors and warnings of a text, in words that do not depend on their line."""
    tree = parse(text)
    if tree is None:
        return frozenset({"it cannot be parsed"})
    found = judge(tell(tree, path), rules)
    severe = (f for f in found if f.severity in (Severity.ERROR, Severity.WARNING))
    return frozenset(re.sub(r"line \d+", "another line", f"{f.rule}: {f.message}") for f in severe)


def _write(args: argparse.Namespace, raw: bytes, before: str, after: str) -> None:
    if args.diff:
        changes = difflib.unified_diff(before.splitlines(True), after.splitlines(True), args.script, args.script)
        sys.stdout.writelines(changes)
    elif args.output or args.in_place:
        _save(Path(args.output or args.script), rewritten(raw, Source(args.script, after)))
    else:
        sys.stdout.write(after)


def _save(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}.") from error


def _say(result: Conversion) -> None:
    for line in result.done:
        print(f"converted: {line}", file=sys.stderr)
    for line in result.left:
        print(f"left: {line}", file=sys.stderr)

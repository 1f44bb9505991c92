"""`halfstep watch SCRIPT ARGS...`: runs a training script unmodified, and says what is wrong, where, and what to do."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from halfstep.findings.finding import Severity

if TYPE_CHECKING:
    from halfstep.findings.finding import Finding
    from halfstep.record.running import Ending
    from halfstep.record.telling import Heard
    from halfstep.record.verdict import Verdict
    from halfstep.rules.settings import Settings


MOST_COLUMNS = 110


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--format", default="text", choices=("text", "json", "sarif", "github"), help="how to report")
    parser.add_argument("--select", metavar="RULES", help="only these rules (names, codes or starts of codes, with commas)")
    parser.add_argument("--ignore", metavar="RULES", help="all but these rules")
    parser.add_argument(
        "--folder", default="halfstep-watch", metavar="FOLDER", help="where a batch that gives NaN or infinity is saved"
    )
    parser.add_argument("--html", metavar="FILE", help="also write the report as one page that opens offline")
    parser.add_argument("--profile", action="store_true", help="find out where the time of a few updates goes")
    parser.add_argument("--replay", metavar="FILE", help="run a saved batch again, with the script's model, and end there")
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE",
        help="run a module, with its arguments, instead of a script",
    )
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")


def run(args: argparse.Namespace) -> int:
    """Run the script, report, and return its exit code, or 1 where it ended well and something is wrong."""
    from halfstep.errors import UsageError
    from halfstep.record.probing import Asked
    from halfstep.record.watching import watch

    replay = None if args.replay is None else Path(args.replay)
    command = _command(args) or ([] if replay is None else _command_of(replay))
    module = command[:1] == ["-m"]
    words = command[1:] if module else command
    if not words:
        raise UsageError("nothing to watch: give a training script, or `-m` and the name of a module.")
    settings = _settings(args, Path.cwd() if module else Path(words[0]).resolve().parent)
    asked = Asked(evidence=Path(args.folder), script=tuple(command), profile=args.profile, replay=replay)
    with _result(args.format) as out:
        return watch(
            words[0],
            words[1:],
            module=module,
            asked=asked,
            report=lambda ending, heard: _reported(heard, ending, settings, args, out),
        )


def _command(args: argparse.Namespace) -> list[str]:
    """The script, or `-m` and the module, with its arguments; nothing where none is given."""
    if args.module is not None:
        return ["-m", *args.module] if args.module else []
    return [args.script, *args.args] if args.script is not None else []


def _command_of(replay: Path) -> list[str]:
    """The command by which the run was started whose batch was saved."""
    from halfstep.record.probes.evidence import load

    return list(load(replay)["script"])


def _reported(heard: list[Heard], ending: Ending, settings: Settings, args: argparse.Namespace, out: TextIO) -> int:
    from halfstep.record.verdict import reach

    if ending.replayed or args.replay is not None:
        print(ending.replayed or "Nothing was run again: the script ended without a forward of its model.", file=out)
        return ending.code
    verdict = reach(heard, settings)
    for fault in dict.fromkeys(process.fault for process in heard if process.fault):
        print(f"halfstep: not all was measured: {fault}", file=sys.stderr)
    for command in dict.fromkeys(command for process in heard for command in process.unheard):
        told = f"halfstep: `{command}` was not heard: only programs of {sys.executable} are. "
        print(f"{told}Write `python -m halfstep watch` into its command.", file=sys.stderr)
    _report(verdict, ending, args.format, out)
    out.flush()
    if args.html is not None:
        _write_page(Path(args.html), " ".join(_command(args)), verdict, ending)
    grave = any(f.severity in (Severity.ERROR, Severity.WARNING) for f in verdict.findings)
    return ending.code or int(grave)


def _write_page(path: Path, title: str, verdict: Verdict, ending: Ending) -> None:
    from halfstep.report.html import Watched, watched_page

    parts = {number: process.measured.get("parts", ()) for number, process in enumerate(verdict.heard)}
    facts = [("updates", str(max((process.updates for process in verdict.heard), default=0)))]
    facts += [("ranks", str(len(verdict.heard)))] if len(verdict.heard) > 1 else []
    facts += [("how it ended", ending.words)] if ending.words else []
    findings = [_near(finding) for finding in verdict.findings]
    sources = {str(Path(f.path)): verdict.sources.get(str(Path(f.path).resolve()), "") for f in findings}
    run = Watched(title=title, findings=findings, parts=parts, facts=facts, sources=sources)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(watched_page(run), encoding="utf-8")
    print(f"halfstep watch: the report is {path}", file=sys.stderr)


def _settings(args: argparse.Namespace, start: Path) -> Settings:
    from dataclasses import replace

    from halfstep.rules.settings import nearest

    found = nearest(start)
    if args.select:
        found = replace(found, select=tuple(args.select.split(",")))
    if args.ignore:
        found = replace(found, ignore=(*found.ignore, *args.ignore.split(",")))
    found.rules()  # a name that is none is said before the run, not after it
    return found


@contextmanager
def _result(form: str) -> Iterator[TextIO]:
    """Where the report goes. Except for text, what the script and its children print goes to standard error."""
    if form == "text":
        yield sys.stdout
        return
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        try:
            with redirect_stdout(sys.stderr):
                yield out
        finally:
            out.flush()
            os.dup2(out.fileno(), 1)


def _report(verdict: Verdict, ending: Ending, form: str, out: TextIO) -> None:
    findings = [_near(f) for f in verdict.findings]
    if form == "json":
        from halfstep.report.json import to_json

        print(to_json(findings, _measured(verdict, ending)), file=out)
    elif form == "sarif":
        from halfstep.report.sarif import to_sarif

        print(to_sarif(findings), file=out)
    elif form == "github":
        from halfstep.report.github import to_github

        print(to_github(findings), end="", file=out)
    else:
        _print_text(verdict, findings, ending, out)


def _measured(verdict: Verdict, ending: Ending) -> dict[str, object]:
    """What was measured, process by process, as data."""
    from halfstep.report.parts import to_dict

    processes = [
        {
            "rank": heard.rank,
            "updates": heard.updates,
            "ending": heard.ending or None,
            "unheard": list(heard.unheard),
            "parts": [to_dict(part) for part in heard.measured.get("parts", ())],
        }
        for heard in verdict.heard
    ]
    return {"ending": ending.words or None, "processes": processes}


def _near(finding: Finding) -> Finding:
    """A finding whose path is told from here, as `check` would."""
    from dataclasses import replace

    path, here = Path(finding.path), Path.cwd()
    return replace(finding, path=str(path.relative_to(here))) if path.is_relative_to(here) else finding


def _print_text(verdict: Verdict, findings: list[Finding], ending: Ending, out: TextIO) -> None:
    from halfstep.report.overview import measured
    from halfstep.report.text import summary, to_text

    sources = {str(Path(f.path)): verdict.sources.get(str(Path(f.path).resolve()), "") for f in findings}
    print("", file=out)
    if findings:
        print(to_text(findings, sources), end="\n\n", file=out)
    if verdict.heard:
        print("\n".join(measured(verdict.heard[0].measured.get("parts", ()), _width(out))), end="\n\n", file=out)
    ended = f" The script did not come to its end: {ending.words}." if ending.words else ""
    print(f"halfstep watch: {_updates(verdict.heard)}.{ended} {summary(len(findings), len(verdict.sources), 0)}", file=out)


def _width(out: TextIO) -> int:
    """The columns of a terminal; enough for a line of a log elsewhere."""
    return min(MOST_COLUMNS, shutil.get_terminal_size().columns) if out.isatty() else MOST_COLUMNS


def _updates(heard: Sequence[Heard]) -> str:
    """How many updates were heard, and on how many ranks or processes."""
    counts = [process.updates for process in heard]
    most = max(counts, default=0)
    told = f"{most} update{'s' * (most != 1)} heard"
    if len(counts) < 2:
        return told
    up_to = "up to " if len(set(counts)) > 1 else ""
    return f"{up_to}{told} on each of {len(counts)} {'ranks' if heard[0].rank is not None else 'processes'}"

"""`halfstep check PATH...`: finds faults in training scripts without running them."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from halfstep.errors import HalfstepError, SourceError, UsageError
from halfstep.findings.finding import Edit, Finding, Safety, Severity
from halfstep.findings.registry import Rule
from halfstep.imagine.edits import Editor, applied
from halfstep.imagine.fixing.actions import fix_of, together
from halfstep.imagine.notebook import moved
from halfstep.imagine.project import fault_of, parse
from halfstep.imagine.source import Source, decoded, files_under, read, rewritten
from halfstep.imagine.story import tell
from halfstep.imagine.suppress import UNUSED, kept
from halfstep.report.text import counted, summary, to_text, where
from halfstep.rules.judge import judge
from halfstep.rules.settings import Settings, nearest, severity_of

MAX_ROUNDS = 4
"""Rounds of fixing: a fix may make room for another."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files, folders, notebooks, or - for standard input")
    parser.add_argument("--fix", action="store_true", help="apply the safe fixes")
    parser.add_argument("--unsafe-fixes", action="store_true", help="apply also fixes that change the numbers")
    parser.add_argument("--diff", action="store_true", help="show what --fix would change, and change nothing")
    parser.add_argument("--select", metavar="RULES", help="only these rules (names, codes or starts of codes, with commas)")
    parser.add_argument("--ignore", metavar="RULES", help="all but these rules")
    parser.add_argument(
        "--severity", default="style", metavar="LEVEL", help="report from here: error, warning, info, perf, style"
    )
    parser.add_argument("--format", default="text", choices=("text", "json", "sarif", "github"), help="how to report")
    parser.add_argument("--baseline", metavar="FILE", help="leave out the findings noted in this file")
    parser.add_argument("--write-baseline", metavar="FILE", help="note today's findings in this file")
    parser.add_argument("--stdin-filename", default="<stdin>", metavar="NAME", help="name for standard input")


@dataclass(slots=True)
class _Report:
    findings: list[Finding] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    files: int = 0
    changed: list[tuple[Source, Source]] = field(default_factory=list)
    left: bool = False
    """Whether a file that was named could not be understood."""
    seen: set[tuple[str, str, int, int | None]] = field(default_factory=set)

    def add(self, findings: list[Finding], source: Source) -> None:
        """Note findings once each, with the sources they lie in."""
        for finding in findings:
            key = (finding.rule, finding.path, finding.line, finding.cell)
            if key not in self.seen:
                self.seen.add(key)
                self.findings.append(finding)
                self.sources.setdefault(where(finding), _text_of(finding, source))


def _text_of(finding: Finding, source: Source) -> str:
    known = source if finding.path == source.path else read(Path(finding.path), forced=True)
    return known.part(finding.cell) if known is not None else ""


def run(args: argparse.Namespace) -> int:
    """Check, report, and say by the exit code whether anything was found."""
    if not args.paths:
        raise UsageError("nothing to check: give a file, a folder, or `-` for standard input.")
    if "-" in args.paths and (args.fix or args.unsafe_fixes) and not args.diff:
        raise UsageError("standard input has no file that could be fixed. Add `--diff` to see what would change.")
    settings = _settings(args)
    limit = severity_of(args.severity)
    report = _check_all(args, settings, limit)
    if args.write_baseline:
        _write_baseline(args.write_baseline, report.findings)
        print(f"{counted(len(report.findings), 'finding')} noted in {args.write_baseline}.", file=sys.stderr)
        return 0
    if args.baseline:
        report.findings = _without_known(report.findings, args.baseline)
    if args.diff:
        _print_diff(report)
    else:
        _print(report, args.format)
    return 2 if report.left else 1 if report.findings or (args.diff and report.changed) else 0


def _settings(args: argparse.Namespace) -> Settings:
    first = next((Path(p) for p in args.paths if p != "-"), Path())
    found = nearest((first if first.is_dir() else first.parent).resolve())
    if args.select:
        found = replace(found, select=_listed(args.select))
    return replace(found, ignore=(*found.ignore, *_listed(args.ignore or "")))


def _listed(words: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in words.split(",") if word.strip())


def _check_all(args: argparse.Namespace, settings: Settings, limit: Severity) -> _Report:
    rules = settings.rules()
    report = _Report()
    safety = {Safety.SAFE, Safety.UNSAFE} if args.unsafe_fixes else {Safety.SAFE} if args.fix or args.diff else set()
    for source in _sources(args.paths, settings, report, args.stdin_filename):
        try:
            after = fixed(source, rules, settings, safety) if safety else source
            if after.text != source.text and (args.diff or _written(after)):
                report.changed.append((source, after))
            else:
                after = source
            found = check_source(after, rules, settings)
        except (HalfstepError, OSError):
            raise
        except Exception as error:
            report.left = True
            print(f"halfstep: {source.path} was not checked: {_fault_of_ours(error)}", file=sys.stderr)
            continue
        if parse(after.text) is None:
            print(f"halfstep: {source.path} is not Python that can be read ({fault_of(after.text)}).", file=sys.stderr)
            report.left |= source.path in args.paths
        report.add([f for f in found if f.severity.weight >= limit.weight], after)
    return report


def _fault_of_ours(error: Exception) -> str:
    """An error in the checker itself, so that the other files still get their answer."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}, line {frame.lineno}"
    return f"halfstep itself failed ({type(error).__name__}: {error}; {place}). Please report it with the file."


def _written(after: Source) -> bool:
    """Write a source over its file, or say why not."""
    path = Path(after.path)
    try:
        path.write_bytes(rewritten(path.read_bytes(), after))
    except SourceError as error:
        print(f"halfstep: {error}", file=sys.stderr)
        return False
    return True


def _sources(paths: list[str], settings: Settings, report: _Report, stdin_name: str) -> Iterable[Source]:
    if "-" in paths:
        report.files += 1
        yield Source(stdin_name, decoded(sys.stdin.buffer.read()))
    named = {p for p in paths if not Path(p).is_dir()}
    for path in files_under([p for p in paths if p != "-"], list(settings.exclude)):
        report.files += 1
        try:
            source = read(path, forced=str(path) in named)
        except SourceError as error:
            if str(path) in named:
                raise
            print(f"halfstep: {error}", file=sys.stderr)
            continue
        if source is not None:
            yield source


def check_source(source: Source, rules: tuple[Rule, ...], settings: Settings) -> list[Finding]:
    """The findings of one source, with their fixes, in the order of their places."""
    tree = parse(source.text)
    if tree is None:
        return []
    found = judge(tell(tree, source.path), rules, settings.severities())
    editor = Editor(source.text)
    safety = {rule.card.name: rule.card.fix for rule in rules}
    own = [_in_letters(_with_fix(f, editor, safety[f.rule]), editor) for f in found if f.path == source.path]
    asked = frozenset(n for rule in rules for n in (rule.card.name, rule.card.code))
    left = kept(own, source.text, source.path, asked)
    here = sorted((_in_cell(f, source) for f in left), key=lambda f: (f.line, f.column, f.code))
    return here + _elsewhere([f for f in found if f.path != source.path])


def _elsewhere(findings: list[Finding]) -> list[Finding]:
    """Findings in other files of the project that this source leads to, as far as those do not suppress them."""
    left: list[Finding] = []
    for path in dict.fromkeys(f.path for f in findings):
        source = read(Path(path), forced=True)
        mine = [replace(f, request=None) for f in findings if f.path == path]
        left += [f for f in kept(mine, source.text if source else "", path, frozenset()) if f.rule != UNUSED]
    return left


def _with_fix(finding: Finding, editor: Editor, safety: Safety) -> Finding:
    if finding.request is None or finding.request.place.path != finding.path:
        return finding
    return replace(finding, fix=fix_of(editor, finding.request, safety))


def _in_letters(finding: Finding, editor: Editor) -> Finding:
    """Columns counted in characters, where the tree counts bytes."""
    if editor.source.isascii():
        return finding
    column = editor.column(finding.line, finding.column - 1) + 1
    return replace(finding, column=column, end_column=editor.column(finding.end_line, finding.end_column - 1) + 1)


def _in_cell(finding: Finding, source: Source) -> Finding:
    """A finding by the lines of its cell; a fix that changes other cells too is not offered."""
    cell = source.cell_of(finding.line)
    if cell is None:
        return finding
    before, fix = cell.first - 1, finding.fix
    inside = fix is not None and all(cell.holds(edit) for edit in fix.edits)
    own = replace(fix, edits=_shifted(fix.edits, -before)) if fix is not None and inside else None
    return replace(finding, cell=cell.number, line=finding.line - before, end_line=finding.end_line - before, fix=own)


def _shifted(edits: Iterable[Edit], lines: int) -> tuple[Edit, ...]:
    return tuple(replace(edit, line=edit.line + lines, end_line=edit.end_line + lines) for edit in edits)


def fixed(source: Source, rules: tuple[Rule, ...], settings: Settings, safety: set[Safety]) -> Source:
    """The source after all fixes of these kinds; never one that does not parse."""
    for _ in range(MAX_ROUNDS):
        findings = check_source(source, rules, settings)
        starts = {cell.number: cell.first - 1 for cell in source.cells}
        wanted = [
            replace(f.fix, edits=_shifted(f.fix.edits, starts[f.cell] if f.cell is not None else 0))
            for f in findings
            if f.fix is not None and f.fix.safety in safety
        ]
        edits = together(wanted)
        after = applied(source.text, edits) if edits else source.text
        if after == source.text or parse(after) is None:
            break
        source = replace(source, text=after, cells=moved(source.cells, edits))
    return source


def _key(finding: Finding) -> str:
    return f"{Path(finding.path).as_posix()}:{finding.rule}:{finding.message}"


def _counts(findings: list[Finding]) -> dict[str, int]:
    return dict(Counter(_key(f) for f in findings))


def _write_baseline(file: str, findings: list[Finding]) -> None:
    try:
        Path(file).write_text(json.dumps(_counts(findings), indent=2, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror or error}.") from error


def _without_known(findings: list[Finding], baseline: str) -> list[Finding]:
    try:
        known = Counter(json.loads(Path(baseline).read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"{baseline} cannot be read: {error.strerror}. Make it with `--write-baseline {baseline}`.") from error
    except (ValueError, TypeError, AttributeError):
        raise UsageError(f"{baseline} is not a baseline. Make one with `--write-baseline {baseline}`.") from None
    left: list[Finding] = []
    for finding in findings:
        if known[_key(finding)] > 0:
            known[_key(finding)] -= 1
        else:
            left.append(finding)
    return left


def _print_diff(report: _Report) -> None:
    for before, after in report.changed:
        for old, new in zip(_parts(before), _parts(after), strict=True):
            name = before.path if old[0] is None else f"{before.path}:cell {old[0]}"
            sys.stdout.writelines(difflib.unified_diff(old[1], new[1], name, name))
    if not report.changed and report.findings:
        print(_nothing_changes(len(report.findings), sum(f.fix is not None for f in report.findings)), file=sys.stderr)


def _nothing_changes(count: int, fixable: int) -> str:
    if not fixable:
        return f"Nothing would change: no fix for {counted(count, 'finding')}."
    changing = "changes the numbers and needs" if fixable == 1 else "change the numbers and need"
    return f"Nothing would change: {counted(fixable, 'fix', 'fixes')} {changing} `--unsafe-fixes`."


def _parts(source: Source) -> list[tuple[int | None, list[str]]]:
    """The lines of a source, or of each of its cells."""
    numbers: list[int | None] = [*(cell.number for cell in source.cells)] or [None]
    return [(number, _ended(source.part(number), notebook=number is not None)) for number in numbers]


def _ended(text: str, *, notebook: bool) -> list[str]:
    return (text + "\n" if notebook else text).splitlines(keepends=True)


def _print(report: _Report, form: str) -> None:
    if form == "json":
        from halfstep.report.json import to_json

        print(to_json(report.findings))
    elif form == "sarif":
        from halfstep.report.sarif import to_sarif

        print(to_sarif(report.findings))
    elif form == "github":
        from halfstep.report.github import to_github

        print(to_github(report.findings), end="")
    else:
        _print_text(report)


def _print_text(report: _Report) -> None:
    if report.findings:
        print(to_text(report.findings, report.sources), end="\n\n")
    fixable = sum(f.fix is not None for f in report.findings)
    print(summary(len(report.findings), report.files, fixable))
    if report.changed:
        print(f"Fixed {len(report.changed)} file{'s' * (len(report.changed) != 1)}.", file=sys.stderr)

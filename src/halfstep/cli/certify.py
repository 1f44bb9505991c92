"""`halfstep certify`: proves on your own model that the numbers are right."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.errors import ConfigError

if TYPE_CHECKING:
    from halfstep.certify.certificate import Line
    from halfstep.certify.subject import Subject

EXIT_NOT_HELD = 1
EXAMPLES = """
examples:
  halfstep certify                          the default model of `halfstep train`
  halfstep certify run.toml                 the model, loss and data of a configuration
  halfstep certify package.module:factory   a function that returns model, `loss(model, batch)` and a list of micro-batches
  halfstep certify run.toml --html certificate.html
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("subject", nargs="?", metavar="CONFIG.toml|MODULE:FACTORY", help="what to certify; none: the default run")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="set one key over the configuration; may be repeated",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="what goes to stdout")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the certificate as a page, too")


def run(args: argparse.Namespace) -> int:
    """Certify; the certificate goes to stdout, lines as they are known to stderr."""
    subject = _subject(args.subject, args.settings)
    from halfstep.certify.certifying import certify
    from halfstep.certify.page import to_page, to_text

    certificate = certify(subject, told=_tell)
    if args.html is not None:
        args.html.write_text(to_page(certificate), encoding="utf-8")
    print(json.dumps(certificate.to_dict(), indent=2) if args.format == "json" else to_text(certificate))
    return 0 if certificate.holds else EXIT_NOT_HELD


def _tell(line: Line) -> None:
    print(f"{line.verdict}: {line.claim}", file=sys.stderr, flush=True)


def _subject(named: str | None, settings: list[str]) -> Subject:
    from halfstep.certify.subject import Subject

    if named is not None and ":" in named and not Path(named).exists():
        if settings:
            raise ConfigError(f"`--set` sets keys of a configuration, and {named} names a factory.")
        return Subject(factory=named)
    return Subject(config=named, settings=tuple(settings))

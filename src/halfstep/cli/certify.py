"""`halfstep certify`: proves on your own model that the numbers are right."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.errors import ConfigError

if TYPE_CHECKING:
    from halfstep.certify.certificate import Certificate, Line
    from halfstep.certify.subject import Subject

EXIT_NOT_HELD = 1
EXAMPLES = """
examples:
  halfstep certify                          the default model of `halfstep train`
  halfstep certify run.toml                 the model, loss and data of a configuration
  halfstep certify package.module:factory   a function that returns model, `loss(model, batch)` and a list of micro-batches
  halfstep certify run.toml --html certificate.html
  halfstep certify --loop train.py --with "--batch 8" --with "--batch 4 --accumulate 2"
                                            your own loop, run with arguments that should be the same training
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
    parser.add_argument(
        "--loop", type=Path, metavar="SCRIPT", help="certify a script that trains, as it is, in each of the ways given"
    )
    parser.add_argument(
        "--with",
        action="append",
        default=[],
        dest="ways",
        metavar="ARGUMENTS",
        help="arguments of the script that split its batch in one way; give two or more that should be the same training",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="what goes to stdout")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the certificate as a page, too")


def run(args: argparse.Namespace) -> int:
    """Certify; the certificate goes to stdout, lines as they are known to stderr."""
    certificate = _of_model(args) if args.loop is None else _of_loop(args)
    from halfstep.certify.page import to_page, to_text

    if args.html is not None:
        args.html.write_text(to_page(certificate), encoding="utf-8")
    print(json.dumps(certificate.to_dict(), indent=2) if args.format == "json" else to_text(certificate))
    return 0 if certificate.holds else EXIT_NOT_HELD


def _of_model(args: argparse.Namespace) -> Certificate:
    if args.ways:
        raise ConfigError("`--with` is for the arguments of a script: name it with `--loop SCRIPT`.")
    subject = _subject(args.subject, args.settings)
    from halfstep.certify.certifying import certify

    return certify(subject, told=_tell)


def _of_loop(args: argparse.Namespace) -> Certificate:
    if args.subject is not None or args.settings:
        raise ConfigError("`--loop` certifies a script as it is: leave out the configuration and `--set`.")
    if not args.loop.is_file():
        raise ConfigError(f"`--loop {args.loop}`: there is no such file.")
    if len(args.ways) < 2:
        raise ConfigError(
            "`--loop` compares ways to split the batch: give two or more, "
            'as `--with "--batch 8 --accumulate 1" --with "--batch 4 --accumulate 2"`, in the words of the script.'
        )
    from halfstep.certify.loops import certify_loop

    return certify_loop(args.loop, [shlex.split(way) for way in args.ways], told=_tell)


def _tell(line: Line) -> None:
    print(f"{line.verdict}: {line.claim}", file=sys.stderr, flush=True)


def _subject(named: str | None, settings: list[str]) -> Subject:
    from halfstep.certify.subject import Subject

    if named is not None and ":" in named and not Path(named).exists():
        if settings:
            raise ConfigError(f"`--set` sets keys of a configuration, and {named} names a factory.")
        return Subject(factory=named)
    return Subject(config=named, settings=tuple(settings))

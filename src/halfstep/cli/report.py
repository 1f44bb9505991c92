"""`halfstep report`: the page of a run, or of several side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLES = """
examples:
  halfstep report runs/first                          writes runs/first/report.html
  halfstep report runs/fp32 runs/bf16 --output both.html
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run of `halfstep train`")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where the page goes; default: report.html in the first run's folder"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page; its path goes to stdout."""
    from halfstep.report.run_page import run_page
    from halfstep.report.runs import read_run

    text = run_page([read_run(folder) for folder in args.runs])
    path = args.output or args.runs[0] / "report.html"
    path.write_text(text, encoding="utf-8")
    print(path)
    return 0

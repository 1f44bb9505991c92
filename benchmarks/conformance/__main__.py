"""`python -m benchmarks.conformance`: the table of stacks and scenarios, printed and written to docs/conformance.md."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.conformance.table import Table, as_json, as_markdown, as_text, made

PAGE = Path("docs/conformance.md")


def main() -> int:
    """Run what was asked for; the exit code is 1 where halfstep is not right."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one process only, and docs/conformance.md stays as it is")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    table: Table = made(quick=args.quick)
    print(json.dumps(as_json(table), indent=2) if args.json else as_text(table))
    if not args.quick:
        PAGE.write_text(as_markdown(table))
    return 0 if table.faults("halfstep") == 0 else 1


if __name__ == "__main__":
    sys.exit(main())

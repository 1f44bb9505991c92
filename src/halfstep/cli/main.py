"""`halfstep COMMAND ...`: finds the command, runs it, turns errors into one sentence and an exit code."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from halfstep import __version__
from halfstep.errors import HalfstepError, RunStopped

COMMANDS = {
    "train": "train a model as the configuration says",
    "plan": "what training a model takes in memory and time, and the best way, before it is run",
    "check": "find faults in training scripts without running them",
    "watch": "run a training script unmodified, and say what is wrong or slow in it",
    "convert": "turn a plain FP32 loop into a right mixed-precision, accumulating, distributed loop",
    "certify": "prove on your own model that the numbers are right",
    "bench": "measure precisions and batches for your own model on this machine",
    "tune": "find the fastest safe way to train by running it, and write the configuration",
    "report": "the page of a run, or of several side by side",
    "explain": "explain a rule of check and watch",
    "env": "what this machine can do, measured, and what 'auto' would choose",
}
"""Name of each command and its one line of help. `halfstep.cli.NAME` has `configure(parser)` and `run(args) -> int`."""

EXIT_STOPPED = 1
EXIT_CANNOT_RUN = 2
EXIT_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 fine, 1 findings or a stopped run, 2 could not run."""
    words = sys.argv[1:] if argv is None else argv
    parser, command_parsers = _parsers()
    command = next((word for word in words if not word.startswith("-")), None)
    if command in COMMANDS:
        import_module(f"halfstep.cli.{command}").configure(command_parsers[command])
    args = parser.parse_args(words)
    if args.command is None:
        parser.print_help()
        return 0
    return _run(args)


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="halfstep",
        description="Makes a PyTorch training run as fast and as small as its hardware allows, "
        "and proves that the numbers are still right.",
        epilog="`halfstep COMMAND --help` says more about each.",
    )
    parser.add_argument("--version", action="version", version=f"halfstep {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    return parser, {name: commands.add_parser(name, help=line, description=line) for name, line in COMMANDS.items()}


def _run(args: argparse.Namespace) -> int:
    try:
        code = import_module(f"halfstep.cli.{args.command}").run(args)
    except RunStopped as error:
        return _fail(error, EXIT_STOPPED)
    except HalfstepError as error:
        return _fail(error, EXIT_CANNOT_RUN)
    except BrokenPipeError:
        sys.stderr.close()
        return EXIT_STOPPED
    except OSError as error:
        return _fail(error, EXIT_CANNOT_RUN)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return int(code)


def _fail(error: Exception, code: int) -> int:
    print(f"halfstep: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())

"""`halfstep train`: trains a model as the configuration says."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.cli.main import EXIT_CANNOT_RUN
from halfstep.config.toml import toml_value
from halfstep.errors import ConfigError, HalfstepError

if TYPE_CHECKING:
    from halfstep.config.schema import Written
    from halfstep.train.interruption import Interruption

SECONDS_FOR_RANK_0 = 10.0

EXAMPLES = """
examples:
  halfstep train                                        a small LLaMA on Python's own source text
  halfstep train --set limits.minutes=2 --set precision=fp32
  halfstep train run.toml --run runs/first              as the file says
  halfstep train run.toml --print-config                what would be run, and why each value is what it is
  halfstep train --resume runs/first                    goes on where that run was last saved
  halfstep train --export runs/first model              the model of its last checkpoint, for from_pretrained
  halfstep train run.toml --processes 2                 as torchrun --nproc-per-node 2 -m halfstep train run.toml
  halfstep train run.toml --processes 2 --set sharding=zero3    the same, with weights and states divided between the ranks
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml", help="a configuration; none: a small run")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="set one key over the configuration, as batch.global=64; may be repeated",
    )
    parser.add_argument("--print-config", action="store_true", help="show the resolved run with its reasons, and end")
    parser.add_argument("--processes", type=int, metavar="N", help="start so many ranks on this machine")
    parser.add_argument(
        "--run",
        "--run-folder",
        metavar="DIR",
        help="the folder in which the run is kept; torchrun, which has words of its own that begin so, wants the longer form",
    )
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder, from its last checkpoint")
    parser.add_argument(
        "--from", type=int, dest="update", metavar="UPDATE", help="with --resume: from the checkpoint after this update"
    )
    parser.add_argument(
        "--export",
        nargs=2,
        type=Path,
        metavar=("RUN", "DIR"),
        help="write the model of the run's last checkpoint, or of that after --from, as a folder for `from_pretrained`",
    )
    parser.add_argument(
        "--continue",
        action="store_true",
        dest="or_resume",
        help="go on with the run in the folder if it holds one: what a scheduler that starts jobs again wants",
    )


def run(args: argparse.Namespace) -> int:
    """Train; the end report goes to stdout, progress to stderr."""
    from halfstep.train.launch import let_waiting_threads_sleep

    if args.export is not None:
        return _export(args)
    written = _written(args)
    let_waiting_threads_sleep()
    from halfstep.distributed.env import world

    if world().size == 1 and not args.print_config and isinstance(written.processes, int) and written.processes > 1:
        return _launch(args, written)
    return _print_config(written, args) if args.print_config else _train(written, args)


def _written(args: argparse.Namespace) -> Written:
    """The configuration: that of a run that goes on, or what the user wrote."""
    from halfstep.config.load import load
    from halfstep.config.resuming import holds_run, load_resumed
    from halfstep.distributed.env import world

    if args.resume is not None and (args.config or args.run or args.or_resume):
        raise ConfigError("`--resume RUN` goes on with the run's own configuration, in its own folder: leave the others out.")
    if args.or_resume:
        folder = load(args.config, [*args.settings, *_settings(args)]).run.folder
        if folder is None:
            raise ConfigError("`--continue` needs to know the run's folder: give `--run-folder DIR`, or `run.folder`.")
        if holds_run(Path(folder)):
            args.resume, args.settings, args.run = Path(folder), [], None
    if args.resume is not None:
        return load_resumed(args.resume, [*args.settings, *_settings(args)], ranks=world().size)
    if args.update is not None:
        raise ConfigError("`--from UPDATE` says where a run goes on: give `--resume RUN` too.")
    return load(args.config, [*args.settings, *_settings(args)])


def _export(args: argparse.Namespace) -> int:
    from halfstep.config.resuming import load_kept

    if args.config or args.settings or args.run or args.processes or args.resume or args.or_resume:
        raise ConfigError("`--export RUN DIR` takes the run as it is: leave all others but `--from` out.")
    run, to = args.export
    written = load_kept(run)
    from halfstep.train.export import export

    print(f"{to} holds the model of {export(written, to, update=args.update)}")
    return 0


def _settings(args: argparse.Namespace) -> list[str]:
    """The flags that are other names of keys."""
    flags = {"processes": args.processes, "run.folder": args.run}
    return [f"{key}={toml_value(value)}" for key, value in flags.items() if value is not None]


def _print_config(written: Written, args: argparse.Namespace) -> int:
    from halfstep.train.job import prepare
    from halfstep.train.saving import Resume

    resume = None if args.resume is None else Resume(update=args.update)
    print(prepare(written, started=datetime.now(), resume=resume).resolved.to_toml(), end="")
    return 0


def _train(written: Written, args: argparse.Namespace) -> int:
    from halfstep.distributed.env import world
    from halfstep.train.interruption import interruptible
    from halfstep.train.job import prepare, train
    from halfstep.train.saving import Resume

    with interruptible() as interruption, _said_once(interruption, world().rank):
        resume = None if args.resume is None else Resume(update=args.update)
        job = prepare(written, started=datetime.now(), resume=resume)
        summary, folder = train(job, interruption, stream=sys.stderr)
    if world().is_first:
        print(f"{summary.to_text()}\n{'kept in':<12}{folder}")
    return 0 if interruption.signal is None else 128 + interruption.signal


@contextmanager
def _said_once(interruption: Interruption, rank: int) -> Iterator[None]:
    """Leave an error that all ranks have to rank 0 to say.

    Another rank waits to be ended, as the launcher does when rank 0 has failed. If nobody ends it, the error is its own.
    """
    try:
        yield
    except HalfstepError as error:
        if rank > 0 and interruption.comes_within(SECONDS_FOR_RANK_0):
            raise SystemExit(EXIT_CANNOT_RUN) from None
        raise type(error)(f"rank {rank}: {error}") if rank > 0 else error from None


def _launch(args: argparse.Namespace, written: Written) -> int:
    """Start the ranks with the same words; each finds its place in what torchrun's library sets."""
    from halfstep.train.launch import launch

    assert isinstance(written.processes, int)
    words = ["train", *([str(args.config)] if args.config else []), *_flags([*args.settings, *_settings(args)]), *_resumed(args)]
    return launch(words, processes=written.processes)


def _resumed(args: argparse.Namespace) -> list[str]:
    """The words that let the ranks go on with a run."""
    words = [] if args.resume is None else ["--resume", str(args.resume)]
    return words if args.update is None else [*words, "--from", str(args.update)]


def _flags(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]

"""`halfstep plan MODEL`: what training a model takes, in memory and time, before it is run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.config.options import Attention, Precision, option
from halfstep.errors import ConfigError, DeviceError, ModelError

if TYPE_CHECKING:
    from halfstep.plan.model_facts import Model
    from halfstep.plan.search import Machine, Plan, Remedy, Wish

EXAMPLES = """
examples:
  halfstep plan llama-7b --gpu A100-80GB --gpus 8 --global-batch 256 --seq 4096
  halfstep plan path/to/config.json --gpu H100 --precision bf16
  halfstep plan gpt2 --gpu "RTX 4090" --trace        counts real tensors, without their memory
  halfstep plan run.toml --gpu L40S                  a configuration of `halfstep train`
  halfstep plan llama-7b --explain-guide-table       why the guide's table of an A100 cannot be as printed
"""
DEFAULT_SEQUENCE = 2048
SHOWN = 6
"""Plans that are shown without `--all`."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("model", metavar="MODEL", help="a known name, a config.json or its folder, or a TOML file of `train`")
    parser.add_argument("--gpu", default="this", metavar="NAME", help="the device; this: this machine, as it was measured")
    parser.add_argument("--measure", action="store_true", help="measure this machine first, half a minute, and remember it")
    parser.add_argument("--gpus", type=int, metavar="N", help="how many of them (default: 1)")
    parser.add_argument(
        "--gpu-memory", type=float, metavar="GB", help="memory that one can use, where it is not the device's own"
    )
    parser.add_argument("--global-batch", type=int, metavar="N", help="sequences (images) of an update, on all devices")
    parser.add_argument("--micro-batch", type=int, metavar="N", help="sequences at a time on one device")
    parser.add_argument("--seq", type=int, metavar="N", help=f"tokens of a sequence (default: {DEFAULT_SEQUENCE})")
    _configure_ways(parser)
    parser.add_argument("--trace", action="store_true", help="count the tensors of the first plan, made without memory by torch")
    parser.add_argument("--explain-guide-table", action="store_true", help="what is wrong with the guide's table, and end")
    parser.add_argument("--all", action="store_true", help="show every plan, with every micro-batch")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="how to show it (default: text)")


def _configure_ways(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", metavar="NAME", help="fp32, fp16, bf16 or bf16-pure; none: what the device has")
    parser.add_argument("--sharding", metavar="NAME", help="none, ddp, zero2 or zero3; none given: all that can be")
    parser.add_argument("--checkpointing", metavar="NAME", help="none, selective, full or offload; none given: none and full")
    parser.add_argument("--optimizer", metavar="NAME", help="adamw, adamw-8bit, adafactor, lion, sgd or sgd-momentum")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank on every product of a block")
    parser.add_argument("--weights", metavar="NAME", help="frozen weights: nf4, nf4-dq or nf4-torchao")
    parser.add_argument("--attention", metavar="NAME", help="sdpa, eager or matmul")
    parser.add_argument("--loss", metavar="NAME", help="whole, parts or chunked: how logits become a loss")
    parser.add_argument("--compile", action="store_true", help="the model is compiled")


def run(args: argparse.Namespace) -> int:
    """Plan, and print the plans to stdout; 1 where none fits."""
    if args.explain_guide_table:
        return _explain(args)
    _check(args)
    from halfstep.plan.model_facts import from_config
    from halfstep.plan.search import Verdict, remedies, search

    config, settings = _asked(args)
    machine = _machine(args, settings)
    model = from_config(config, args.model)
    wish = _wish(args, settings, model)
    _check_trace(args, wish)
    plans = search(model, machine, wish, every=args.all)
    fits = plans[0].verdict is Verdict.FITS
    changes = [] if fits else remedies(model, machine, wish)
    traced = _trace(config, plans[0], wish) if args.trace else None
    print(_shown(args, model, machine, plans, changes, traced))
    return 0 if fits else 1


def _explain(args: argparse.Namespace) -> int:
    from halfstep.plan.guide_table import told, verdicts

    print(json.dumps([asdict(verdict) for verdict in verdicts()], indent=2) if args.format == "json" else told())
    return 0


def _check(args: argparse.Namespace) -> None:
    counts = ("gpus", "gpu_memory", "global_batch", "micro_batch", "seq", "lora")
    for name in counts:
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ConfigError(f"`--{name.replace('_', '-')} {value}` must be above 0.")
    if args.measure and args.gpu != "this":
        raise ConfigError("`--measure` measures this machine, and `--gpu` names another. Leave out one of them.")
    if args.weights and not args.lora and not args.model.endswith(".toml"):
        raise ConfigError("`--weights` is for weights that are not trained: give `--lora RANK` too.")


def _check_trace(args: argparse.Namespace, wish: Wish) -> None:
    """What the tracer would count otherwise than the plan has it."""
    from halfstep.plan.recipe import BaseWeights, Checkpointing, Optimizer

    odd = {
        "checkpointing": wish.checkpointing if wish.checkpointing in (Checkpointing.SELECTIVE, Checkpointing.OFFLOAD) else None,
        "optimizer": wish.optimizer if wish.optimizer is Optimizer.ADAFACTOR else None,
        "weights": wish.weights if wish.weights is not BaseWeights.PLAIN else None,
        "compile": "" if wish.compiled else None,
    }
    for name, value in odd.items():
        if args.trace and value is not None:
            raise ConfigError(f"`--trace` cannot count `--{name}{f' {value}' if value else ''}`. Leave out one of them.")


def _asked(args: argparse.Namespace) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The model's configuration, and what a configuration of `train` says beside it."""
    from halfstep.plan.reading import config_of

    if not args.model.endswith(".toml"):
        return config_of(args.model), {}
    from halfstep.config.inputs import BYTES, Tokenizers, resolve_inputs
    from halfstep.config.load import load
    from halfstep.config.resolve import BYTES_SEQUENCE, LONGEST_AUTOMATIC_SEQUENCE
    from halfstep.plan.reading import holds_tokenizer, tokens_of

    written = load(Path(args.model))
    inputs = resolve_inputs(written, Tokenizers(exists=holds_tokenizer, size=tokens_of))
    if inputs.factory is not None:
        raise ConfigError(
            f"{args.model} has a model of your own (`model.factory`), whose shapes only running it shows: `halfstep bench`."
        )
    config = config_of(inputs.path) if inputs.path else {"model_type": inputs.architecture, **(inputs.config or {})}
    if inputs.classes is not None:
        config = {**config, "num_labels": len(inputs.classes)}
    usual = BYTES_SEQUENCE if inputs.tokenizer == BYTES else LONGEST_AUTOMATIC_SEQUENCE
    return config, {**_settings(written), "usual_seq": usual, "labels_samples": inputs.task.has_classes}


def _settings(written: Any) -> dict[str, Any]:
    """The settings of a run that a plan depends on; what is "auto" is left to the search."""
    again = {True: "full", False: "none"}
    told = {
        "gpus": written.processes,
        "sharding": written.sharding and str(written.sharding),
        "global_batch": written.batch.global_,
        "micro_batch": written.batch.micro,
        "seq": written.data.sequence_length,
        "precision": written.precision and str(written.precision),
        "optimizer": written.optimizer.name and str(written.optimizer.name),
        "checkpointing": again.get(written.model.checkpoint_activations),
        "loss": "whole" if written.model.loss_chunk == 0 else "chunked",
        "attention": written.model.attention and str(written.model.attention),
        "compile": written.model.compile,
        **_adapters(written.lora),
    }
    return {name: value for name, value in told.items() if value not in (None, "auto")}


def _adapters(lora: Any) -> dict[str, Any]:
    if lora is None:
        return {}
    from halfstep.config.decisions import Decisions
    from halfstep.config.tasks import ALL_LINEAR, resolve_lora

    decided: Any = resolve_lora(lora, Decisions())
    return {"lora": decided.rank, "lora_everywhere": list(decided.targets) == [ALL_LINEAR], "lora_dropout": decided.dropout > 0}


def _machine(args: argparse.Namespace, settings: Mapping[str, Any]) -> Machine:
    from halfstep.measure.cache_folder import cache_dir
    from halfstep.plan.calibration import kept
    from halfstep.plan.machines import measured, named

    devices = args.gpus or settings.get("gpus") or 1
    if args.gpu != "this":
        return named(args.gpu, devices, args.gpu_memory)
    if args.measure:
        _measure(cache_dir())
    calibration = kept(cache_dir())
    if calibration is None:
        raise DeviceError("This machine was not measured yet: name a device, as `--gpu A100-80GB`, or measure with `--measure`.")
    return measured(calibration, devices, args.gpu_memory)


def _measure(cache: Path) -> None:
    from halfstep._compat import accelerator_device
    from halfstep.measure.calibrating import calibrate
    from halfstep.plan.calibration import keep

    keep(calibrate(accelerator_device()), cache)


def _wish(args: argparse.Namespace, settings: Mapping[str, Any], model: Model) -> Wish:
    from halfstep.config.options import Sharding
    from halfstep.plan.recipe import BaseWeights, Checkpointing, Loss, Optimizer
    from halfstep.plan.search import Wish

    def asked(name: str) -> Any:
        given = getattr(args, name)
        return settings.get(name) if given is None else given

    def chosen(kind: Any, name: str) -> Any:
        value = asked(name)
        return None if value is None else option(kind, "adamw" if value == "adam" else value, name=f"--{name}")

    return Wish(
        sequence=_sequence(args, model, asked("seq"), settings.get("usual_seq", DEFAULT_SEQUENCE)),
        global_batch=asked("global_batch"),
        micro_batch=asked("micro_batch"),
        precision=chosen(Precision, "precision"),
        sharding=chosen(Sharding, "sharding"),
        checkpointing=chosen(Checkpointing, "checkpointing"),
        optimizer=chosen(Optimizer, "optimizer") or Optimizer.ADAMW,
        labels_samples=settings.get("labels_samples", False),
        lora_rank=asked("lora"),
        lora_everywhere=settings.get("lora_everywhere", True),
        lora_dropout=settings.get("lora_dropout", False),
        weights=chosen(BaseWeights, "weights") or BaseWeights.PLAIN,
        attention=chosen(Attention, "attention") or Attention.SDPA,
        compiled=args.compile or settings.get("compile", False),
        loss=chosen(Loss, "loss") or Loss.WHOLE,
    )


def _sequence(args: argparse.Namespace, model: Model, asked: int | None, usual: int) -> int:
    """Tokens of a sample, no more than the model has positions for."""
    most = getattr(model, "context", None)
    if model.fixed_length is not None:
        if args.seq is not None:
            raise ConfigError(
                f"`--seq {args.seq}` has no effect: {args.model} takes images, whose length is its own. Leave it out."
            )
        return model.fixed_length
    if asked is not None and most is not None and asked > most:
        raise ConfigError(f"`--seq {asked}` is longer than the {most} positions that {args.model} has. Use {most} or less.")
    return asked or min(usual, most or usual)


def _shown(
    args: argparse.Namespace, model: Model, machine: Machine, plans: list[Plan], changes: list[Remedy], traced: Any
) -> str:
    from halfstep.plan.text import to_text, traced_text

    if args.format == "json":
        told = {"model": args.model, "parameters": model.parameters, "device": machine.name, "memory_bytes": machine.memory_bytes}
        listed = [_record(plan) for plan in plans]
        changed = [{"change": each.change, "plan": _record(each.plan)} for each in changes]
        return json.dumps({**told, "plans": listed, "remedies": changed, "traced": traced}, indent=2)
    text = to_text(model, machine, plans, changes, most=None if args.all else SHOWN)
    return text if traced is None else f"{text}\n\n{traced_text(traced, model, plans[0].recipe)}"


def _record(plan: Plan) -> dict[str, Any]:
    bill, time = plan.bill, plan.time
    sums = {
        "peak_phase": bill.peak_phase,
        "allocated_bytes": bill.allocated_bytes,
        "reserved_bytes": bill.reserved_bytes,
        "device_bytes": bill.device_bytes,
    }
    return asdict(plan) | {"memory": sums, "tokens_per_s": [time.rate_low, time.rate, time.rate_high]}


def _trace(config: Mapping[str, Any], plan: Plan, wish: Wish) -> dict[str, Any]:
    """What fake tensors count for the plan on one device, with nothing divided."""
    recipe = plan.recipe
    job = {
        "config": dict(config),
        "precision": recipe.precision,
        "micro_batch": recipe.micro_batch,
        "sequence": recipe.sequence,
        "accumulation": recipe.accumulation,
        "checkpointing": recipe.checkpointing,
        "attention": recipe.attention,
        "optimizer": recipe.optimizer,
        "chunked_loss": recipe.loss == "chunked",
        "lora_rank": wish.lora_rank,
        "lora_everywhere": wish.lora_everywhere,
        "lora_dropout": 0.1 if wish.lora_dropout else 0.0,
    }
    command = [sys.executable, "-m", "halfstep.cli.tracing"]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False)
    told: dict[str, Any] = (
        json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": _last_line(done.stderr)}
    )
    if "error" in told:
        raise ModelError(f"`--trace` could not count it: {told['error']}")
    return told


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["the process ended without a word"])[-1]

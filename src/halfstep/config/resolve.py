"""The one place where "auto" becomes a value, and leaves its reason.

It happens in two steps, because some facts cost something: `inputs.py` says what has to be opened (model, text,
tokenizer); when that has been looked at, `resolve` decides the rest.
"""

from __future__ import annotations

from dataclasses import replace

from halfstep.config.batch import automatic_global, automatic_micro, check_division
from halfstep.config.choice import ASKED_FOR, Choice
from halfstep.config.decisions import Decisions, is_auto
from halfstep.config.facts import Cut, Facts
from halfstep.config.horizon import num_windows, planned_updates
from halfstep.config.inputs import BYTES, Inputs
from halfstep.config.optimization import decide_optimizer, decide_scheduler
from halfstep.config.options import Attention, DataKind, Precision, Tail, Task, TooLong
from halfstep.config.run import BatchRun, CheckpointRun, DataRun, EvaluationRun, LimitsRun, ModelRun, OutputRun, Resolved, Run
from halfstep.config.schema import CheckpointSection, EvaluationSection, LimitsSection, Written
from halfstep.config.sharding import decide_sharding
from halfstep.config.tasks import chosen_classes, resolve_lora
from halfstep.errors import ConfigError

DEFAULT_UPDATES = 450
DEFAULT_SEQUENCE = 128
BYTES_SEQUENCE = 256
LONGEST_MATMUL_SEQUENCE = 512
LONGEST_AUTOMATIC_SEQUENCE = 1024
HELD_OUT_BYTES = 65_536
EVALUATIONS = 5


def held_out_share(asked: EvaluationSection, text_bytes: int | None) -> Choice[float]:
    """How much of the text is held out, where no files are named for it."""
    decisions = Decisions()
    decisions.take("share", asked.share, lambda: _share(text_bytes))
    choice: Choice[float] = decisions.choices["share"]
    return choice


def resolve(written: Written, inputs: Inputs, facts: Facts) -> Resolved:
    """The complete run that the configuration asks for, on the machine, model and data of the facts.

    Raises:
        ConfigError: two settings contradict each other or the facts.
    """
    decisions = Decisions()
    decisions.choices.update(inputs.choices)
    sequence_length = _sequence_length(written, inputs, facts, decisions)
    data = _data(written, inputs, facts, sequence_length, decisions)
    cut = _cut(facts, data)
    processes = _processes(written, facts, decisions)
    batch = _batch(written, facts, decisions, processes=processes, data=data, windows=cut.sequences)
    limits = _limits(written.limits, inputs, decisions)
    planned = planned_updates(limits, batch, cut)
    precision = _precision(written, facts, decisions)
    optimizer = decide_optimizer(
        written.optimizer, facts, decisions, pretrained=inputs.path is not None, adapters=written.lora is not None
    )
    run = Run(
        precision=precision,
        device=decisions.take("device", written.device, lambda: _device(facts)),
        processes=processes,
        sharding=decide_sharding(
            written.sharding, facts, decisions, precision=precision, optimizer=optimizer, processes=processes
        ),
        watch=decisions.default("watch", written.watch, False, "hearing a run takes a few percent of its time"),
        model=_model(written, inputs, facts, sequence_length, decisions),
        lora=resolve_lora(written.lora, decisions),
        data=data,
        batch=batch,
        optimizer=optimizer,
        scheduler=decide_scheduler(written.scheduler, planned, decisions),
        evaluation=_evaluation(written.evaluation, inputs, facts, planned, decisions),
        limits=limits,
        checkpoint=_checkpoint(written.checkpoint, decisions),
        run=_run(written, inputs, facts, decisions),
    )
    return Resolved(run=run, choices=decisions.choices, planned_updates=planned)


def _data(written: Written, inputs: Inputs, facts: Facts, sequence_length: int | None, decisions: Decisions) -> DataRun:
    asked = written.data
    packing, too_long = None, None
    if inputs.kind is not None and inputs.task is Task.CAUSAL_LM:
        packing = decisions.take("data.packing", asked.packing, lambda: facts.packing or _packing(facts.machine.device))
    if inputs.task is Task.MASKED_LM or (inputs.kind is not None and sequence_length is not None):
        too_long = decisions.take("data.too_long", asked.too_long, lambda: _too_long(inputs.kind))
    _refuse_without_effect(written, inputs, too_long)
    if facts.data.image_size is not None:
        decisions.choices["data.image_size"] = facts.data.image_size
    return DataRun(
        corpus=inputs.corpus,
        files=inputs.files,
        factory=inputs.data_factory,
        config=inputs.data_config,
        format=inputs.format,
        kind=inputs.kind,
        classes=chosen_classes(written, facts.data.classes, decisions),
        image_size=None if facts.data.image_size is None else facts.data.image_size.value,
        columns=inputs.columns,
        packing=packing,
        too_long=too_long,
        tokenizer=inputs.tokenizer,
        sequence_length=sequence_length,
        workers=decisions.take("data.workers", asked.workers, lambda: facts.workers or Choice(value=0, reason="not tried")),
    )


def _refuse_without_effect(written: Written, inputs: Inputs, too_long: TooLong | None) -> None:
    """Say it where a setting asks for what the task does not do."""
    if inputs.task is not Task.CAUSAL_LM and not is_auto(written.data.packing):
        raise ConfigError(f'`data.packing` has no effect on the task "{inputs.task}". Leave it out.')
    if inputs.task is not Task.IMAGE_CLASSIFICATION and not is_auto(written.data.image_size):
        raise ConfigError(f'`data.image_size` has no effect on the task "{inputs.task}". Leave it out.')
    if inputs.kind is DataKind.LABEL and too_long is TooLong.SPLIT:
        raise ConfigError('`data.too_long = "split"` cannot be: a label is that of a whole text. Use "cut" or "drop".')


def _packing(device: str) -> Choice[bool]:
    if device == "cpu":
        reason = "on a CPU a packed token pays for attention over its whole sequence; documents of about one length hardly pad"
        return Choice(value=False, reason=reason)
    return Choice(value=True, reason="not tried")


def _too_long(kind: DataKind | None) -> Choice[TooLong]:
    if kind is DataKind.LABEL:
        return Choice(value=TooLong.CUT, reason="the start of a text says most")
    if kind is DataKind.TEXT or kind is None:
        return Choice(value=TooLong.SPLIT, reason="no token of a text is lost")
    return Choice(value=TooLong.CUT, reason="the later part of an answer means nothing without its prompt")


def _cut(facts: Facts, data: DataRun) -> Cut:
    if facts.data.samples is not None:
        return Cut(sequences=facts.data.samples, predicted=facts.data.samples)
    assert data.sequence_length is not None
    if facts.data.cut is not None and data.too_long is not None:
        return facts.data.cut(data.sequence_length, data.packing, data.too_long)
    windows = num_windows(facts.data.train_tokens, data.sequence_length)
    return Cut(sequences=windows, predicted=windows * (data.sequence_length - 1))


def _model(written: Written, inputs: Inputs, facts: Facts, sequence_length: int | None, decisions: Decisions) -> ModelRun:
    asked = written.model
    attention: Attention | None = None
    if inputs.factory is None:
        attention = decisions.take("model.attention", asked.attention, lambda: _attention(written, facts, sequence_length))
    if attention not in (None, *facts.model.attentions):
        others = " or ".join(f'"{each}"' for each in facts.model.attentions)
        raise ConfigError(f'`model.attention = "{attention}"` is not offered by this architecture. Use {others}.')
    return ModelRun(
        path=inputs.path,
        architecture=inputs.architecture,
        factory=inputs.factory,
        config=inputs.config,
        task=inputs.task,
        loss=inputs.loss,
        frozen=None if asked.frozen is None else tuple(asked.frozen),
        attention=attention,
        checkpoint_activations=decisions.default(
            "model.checkpoint_activations", asked.checkpoint_activations, False, "recomputing costs a third more time"
        ),
        compile=decisions.default(
            "model.compile", asked.compile, False, "compiling takes a minute or so, which a short run does not win back"
        ),
        loss_chunk=decisions.take(
            "model.loss_chunk", asked.loss_chunk, lambda: facts.loss_chunk or Choice(value=0, reason="not tried")
        ),
        label_smoothing=decisions.default("model.label_smoothing", asked.label_smoothing, 0.0, "targets as they are"),
    )


def _attention(written: Written, facts: Facts, sequence_length: int | None) -> Choice[Attention]:
    if Attention.SDPA not in facts.model.attentions:
        return Choice(value=Attention.EAGER, reason="the architecture offers no other")
    precision = facts.precision.value if is_auto(written.precision) and facts.precision else written.precision
    if facts.machine.device == "cpu" and precision is Precision.FP32:
        return Choice(value=Attention.SDPA, reason="in FP32 the fused kernel takes less than plain matmuls, on a CPU too")
    short = (sequence_length or 0) <= LONGEST_MATMUL_SEQUENCE and Attention.MATMUL in facts.model.attentions
    if facts.machine.device == "cpu" and precision is not Precision.FP16 and short:
        reason = f"on a CPU matmuls in BF16 take half the fused kernel's time up to {LONGEST_MATMUL_SEQUENCE} tokens"
        return Choice(value=Attention.MATMUL, reason=reason)
    return Choice(value=Attention.SDPA, reason="fused, without the scores in memory")


def _share(text_bytes: int | None) -> Choice[float]:
    if text_bytes is None:
        return Choice(value=0.1, reason="a tenth of the samples")
    share = round(min(0.1, max(0.01, HELD_OUT_BYTES / max(1, text_bytes))), 4)
    return Choice(value=share, reason=f"about 64 KiB of the text, within 1% and 10% of its {text_bytes / 1e6:.2f} MB")


def _sequence_length(written: Written, inputs: Inputs, facts: Facts, decisions: Decisions) -> int | None:
    if inputs.tokenizer is None:
        if not is_auto(written.data.sequence_length):
            raise ConfigError("`data.sequence_length` has no effect on data that are no tokens. Leave it out.")
        return None
    context = facts.model.context
    length = decisions.take("data.sequence_length", written.data.sequence_length, lambda: _length(inputs, facts))
    if context is not None and length > context:
        raise ConfigError(
            f"`data.sequence_length = {length}` is longer than the context of the model, which is {context} tokens. "
            f"Use at most {context}."
        )
    return length


def _length(inputs: Inputs, facts: Facts) -> Choice[int]:
    context, longest = facts.model.context, facts.data.longest
    if inputs.corpus is not None and inputs.architecture is not None:
        return Choice(value=DEFAULT_SEQUENCE, reason="short, for the many updates that a small model needs")
    if longest is not None:
        return _length_for_documents(longest, context)
    usual = BYTES_SEQUENCE if inputs.tokenizer == BYTES else LONGEST_AUTOMATIC_SEQUENCE
    if context is not None and context < usual:
        return Choice(value=context, reason="the context of the model")
    return Choice(value=usual, reason="usual for tokens that are bytes" if inputs.tokenizer == BYTES else "usual")


def _length_for_documents(longest: int, context: int | None) -> Choice[int]:
    """Room for the longest document, in whole multiples of 64, within the context and what is usual."""
    room = max(64, -(-longest // 64) * 64)
    most = min(LONGEST_AUTOMATIC_SEQUENCE, context or LONGEST_AUTOMATIC_SEQUENCE)
    if room <= most:
        return Choice(value=room, reason=f"room for the longest document of {longest:,} tokens")
    return Choice(
        value=most,
        reason=f"the context of the model and at most {LONGEST_AUTOMATIC_SEQUENCE:,}; the longest document has {longest:,}",
    )


def _processes(written: Written, facts: Facts, decisions: Decisions) -> int:
    world = facts.machine.world_size
    if world == 1:
        return decisions.default("processes", written.processes, 1, "`--processes N` starts more")
    if not is_auto(written.processes) and written.processes != world:
        raise ConfigError(f"`processes = {written.processes}`, but torchrun started {world}. Leave `processes` out.")
    return decisions.default("processes", None, world, "started by torchrun")


def _batch(written: Written, facts: Facts, decisions: Decisions, *, processes: int, data: DataRun, windows: int) -> BatchRun:
    asked = written.batch
    sequence_length = usual = data.sequence_length
    if data.packing is False and sequence_length is not None:
        usual = max(1, min(sequence_length, -(-facts.data.train_tokens // max(1, windows))))
    asked_micro = None if is_auto(asked.micro) else asked.micro
    global_batch = decisions.take(
        "batch.global",
        asked.global_,
        lambda: automatic_global(
            micro=asked_micro if isinstance(asked_micro, int) else None,
            ranks=processes,
            sequence_length=usual,
            windows=windows,
        ),
    )
    micro = decisions.take(
        "batch.micro",
        asked.micro,
        lambda: automatic_micro(global_batch=global_batch, ranks=processes, sequence_length=sequence_length, facts=facts),
    )
    check_division(global_batch=global_batch, micro=micro, ranks=processes)
    tail = decisions.default("batch.tail", asked.tail, Tail.STEP, "no sample is lost; a shorter window is exactly weighted")
    return BatchRun(global_=global_batch, micro=micro, tail=tail)


def _limits(asked: LimitsSection, inputs: Inputs, decisions: Decisions) -> LimitsRun:
    limits = LimitsRun(updates=asked.updates, epochs=asked.epochs, tokens=asked.tokens, minutes=asked.minutes)
    if any((limits.updates, limits.epochs, limits.tokens, limits.minutes)):
        return limits
    if inputs.corpus is not None:
        updates = decisions.default("limits.updates", None, DEFAULT_UPDATES, "no limit was given: a few minutes on two cores")
        return LimitsRun(updates=updates, epochs=None, tokens=None, minutes=None)
    epochs = decisions.default("limits.epochs", None, 1, "no limit was given")
    return LimitsRun(updates=None, epochs=epochs, tokens=None, minutes=None)


def _precision(written: Written, facts: Facts, decisions: Decisions) -> Precision:
    measured = facts.precision
    if measured is None:
        return decisions.default("precision", written.precision, Precision.FP32, "not measured")
    return decisions.take("precision", written.precision, lambda: measured)


def _device(facts: Facts) -> Choice[str]:
    if facts.machine.device == "cpu":
        return Choice(value="cpu", reason="torch finds no accelerator on this machine")
    return Choice(value=facts.machine.device, reason=f"the accelerator that torch finds: {facts.machine.device_name}")


def _evaluation(
    asked: EvaluationSection, inputs: Inputs, facts: Facts, planned: int | None, decisions: Decisions
) -> EvaluationRun:
    if inputs.evaluation_files is None:
        share = held_out_share(asked, facts.data.text_bytes)
        found = share if share.reason == ASKED_FOR else replace(share, reason=f"{share.reason}: {facts.data.held_out}")
        decisions.choices["evaluation.share"] = found
    every = decisions.take("evaluation.every_updates", asked.every_updates, lambda: _every(facts, planned))
    return EvaluationRun(
        every_updates=every,
        share=None if inputs.evaluation_files is not None else decisions.choices["evaluation.share"].value,
        files=inputs.evaluation_files,
        keep_best=decisions.default(
            "evaluation.keep_best",
            asked.keep_best,
            every > 0,
            "the best model is kept beside the last, if any is judged",
        ),
        patience=decisions.default("evaluation.patience", asked.patience, 0, "the limits alone end the run"),
    )


def _every(facts: Facts, planned: int | None) -> Choice[int]:
    if facts.data.evaluation_tokens < (2 if facts.data.samples is None else 1):
        return Choice(value=0, reason="there is too little to hold some of it out")
    if planned is None:
        return Choice(value=200, reason="200 where the number of updates is unknown")
    return Choice(value=max(1, -(-planned // EVALUATIONS)), reason=f"{EVALUATIONS} times in {planned:,} updates")


def _checkpoint(asked: CheckpointSection, decisions: Decisions) -> CheckpointRun:
    updates = decisions.default("checkpoint.every_updates", asked.every_updates, 0, "the clock says when")
    often = "`every_updates` says when" if updates else "so much work is lost at most; a save keeps it waiting for a copy only"
    return CheckpointRun(
        every_updates=updates,
        every_minutes=decisions.default("checkpoint.every_minutes", asked.every_minutes, 0.0 if updates else 10.0, often),
        keep=decisions.default("checkpoint.keep", asked.keep, 2, "the last one, and one before it in case that is damaged"),
    )


def _rank_minutes(facts: Facts) -> tuple[float, str]:
    backend, minutes = ("gloo", 30.0) if facts.machine.device == "cpu" else ("the device's backend", 10.0)
    return minutes, f"so long torch waits by itself with {backend}"


def _run(written: Written, inputs: Inputs, facts: Facts, decisions: Decisions) -> OutputRun:
    name = inputs.architecture or (inputs.factory or str(inputs.path).rstrip("/").rpartition("/")[2]).replace(":", ".")
    folder = f"runs/{facts.started:%Y-%m-%d-%H%M%S}-{name}"
    return OutputRun(
        folder=decisions.default("run.folder", written.run.folder, folder, "the time of the start"),
        seed=decisions.default("run.seed", written.run.seed, 0, "the same run every time"),
        deterministic=decisions.default(
            "run.deterministic", written.run.deterministic, False, "kernels that repeat bitwise can be slower"
        ),
        tensorboard=decisions.default("run.tensorboard", written.run.tensorboard, True, "events cost next to nothing"),
        loggers=tuple(decisions.default("run.loggers", written.run.loggers, [], "none was asked for")),
        rank_minutes=decisions.default("run.rank_minutes", written.run.rank_minutes, *_rank_minutes(facts)),
    )

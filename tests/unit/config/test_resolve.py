"""The one place where "auto" becomes a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from halfstep.config.choice import ASKED_FOR, Choice
from halfstep.config.facts import DataFacts, Facts, MachineFacts, ModelFacts
from halfstep.config.inputs import Tokenizers, resolve_inputs
from halfstep.config.load import load
from halfstep.config.options import Attention, Precision, SchedulerName
from halfstep.config.resolve import resolve
from halfstep.config.run import Resolved
from halfstep.config.schema import known_keys
from halfstep.errors import ConfigError

TOKENIZERS = Tokenizers(exists=lambda folder: folder == "with-tokenizer", size=lambda folder: 1000)
FACTS = Facts(
    machine=MachineFacts(device="cpu", device_name="a CPU", cores=2, memory_bytes=8 * 10**9, world_size=1),
    model=ModelFacts(parameters=10**6, hidden=256, layers=4, vocabulary=256, context=2048, attentions=tuple(Attention)),
    data=DataFacts(
        text_bytes=8_000_000,
        train_tokens=7_900_000,
        train_files=300,
        evaluation_tokens=100_000,
        evaluation_bytes=100_000,
        held_out="5 of 300 files",
    ),
    started=datetime(2026, 1, 2, 3, 4, 5),
    precision=Choice(value=Precision.BF16, reason="measured: 1.8 times the speed of fp32"),
)


def resolved(*settings: str, facts: Facts = FACTS) -> Resolved:
    written = load(None, settings)
    return resolve(written, resolve_inputs(written, TOKENIZERS), facts)


def fault(*settings: str, facts: Facts = FACTS) -> str:
    with pytest.raises(ConfigError) as error:
        resolved(*settings, facts=facts)
    return str(error.value)


def on(facts: Facts = FACTS, **machine: Any) -> Facts:
    return replace(facts, machine=replace(facts.machine, **machine))


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in table.items():
        inner = isinstance(value, Mapping) and prefix + key != "model.config"
        values.update(flat(value, f"{prefix}{key}.") if inner else {prefix + key: value})
    return values


def test_a_run_has_every_key_of_the_schema_and_no_other() -> None:
    assert sorted(flat(resolved("lora.rank=4").run.to_dict())) == sorted(known_keys())


def test_every_value_has_a_reason() -> None:
    run = resolved()
    for key, value in flat(run.run.to_dict()).items():
        assert value is None or run.choices[key].reason, key


def test_the_reasons_hold_the_values_of_the_run() -> None:
    run = resolved("batch.global=64", "optimizer.name=sgd")
    values = flat(run.run.to_dict())
    for key, choice in run.choices.items():
        assert values[key] in (choice.value, str(choice.value)), key


def test_what_the_user_wrote_is_taken_as_it_is() -> None:
    run = resolved("batch.global=64", "batch.micro=8", "precision=fp32", "run.seed=7")
    assert (run.run.batch.global_, run.run.batch.micro, run.run.accumulate) == (64, 8, 8)
    assert run.run.precision is Precision.FP32
    assert run.choices["batch.micro"].reason == ASKED_FOR
    assert run.choices["run.seed"].reason == ASKED_FOR


def test_a_resolved_run_written_as_toml_asks_for_the_same_run(tmp_path: Path) -> None:
    first = resolved("data.files=['a.txt', 'b.txt']", "evaluation.every_updates=7", "limits.tokens=100000")
    file = tmp_path / "run.toml"
    file.write_text(first.to_toml())
    written = load(file)
    second = resolve(written, resolve_inputs(written, TOKENIZERS), FACTS)
    assert second.run == first.run
    assert {choice.reason for choice in second.choices.values()} == {ASKED_FOR}


def test_toml_shows_reasons_of_automatic_values_only() -> None:
    lines = resolved("batch.global=64").to_toml().splitlines()
    assert "global = 64" in lines
    assert 'precision = "bf16"  # measured: 1.8 times the speed of fp32' in lines


def test_a_scheduler_that_falls_needs_to_know_where_the_run_ends() -> None:
    assert fault("limits.minutes=3", "scheduler.name=cosine") == (
        '`scheduler.name = "cosine"` needs to know where the run ends, and `limits.minutes` does not say it in updates. '
        'Give `limits.updates`, `limits.epochs` or `limits.tokens` too, or use "constant".'
    )


def test_the_clock_alone_means_a_constant_learning_rate() -> None:
    run = resolved("limits.minutes=3")
    assert run.planned_updates is None
    assert run.run.scheduler.name is SchedulerName.CONSTANT


def test_a_setting_of_another_optimizer_is_refused() -> None:
    assert fault("optimizer.momentum=0.9") == (
        '`optimizer.momentum` has no effect on "adamw": it belongs to "sgd". Leave it out.'
    )


def test_a_model_is_loaded_or_built_and_not_both() -> None:
    assert fault("model.path=a", "model.architecture=llama") == (
        "`model.path` and `model.architecture` or `model.config` are both given: a model is loaded from a folder or built "
        "from its architecture. Leave one of them out."
    )


def test_files_and_corpus_exclude_each_other() -> None:
    sentence = "`data.files` and `data.corpus` are both given. Leave one of them out."
    assert fault("data.files=a.txt", "data.corpus=python-stdlib") == sentence


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    assert fault("data.sequence_length=4096") == (
        "`data.sequence_length = 4096` is longer than the context of the model, which is 2048 tokens. Use at most 2048."
    )


def test_a_batch_that_does_not_divide_over_the_ranks_is_refused() -> None:
    assert fault("batch.global=100", "batch.micro=8", facts=on(world_size=4)) == (
        "`batch.global = 100` cannot be split over 4 ranks of 8: 100 / 32 is not whole. Use 96 or 128, or `batch.micro = 5`."
    )


def test_processes_must_be_what_torchrun_started() -> None:
    assert fault("processes=3", facts=on(world_size=2)) == ("`processes = 3`, but torchrun started 2. Leave `processes` out.")


def test_the_tokenizer_comes_from_the_model_folder_if_it_holds_one() -> None:
    assert resolved("model.path=with-tokenizer").run.data.tokenizer == "with-tokenizer"
    assert resolved("model.path=without").run.data.tokenizer == "bytes"


def test_a_model_that_is_built_gets_the_vocabulary_of_its_tokenizer() -> None:
    assert resolved("model.architecture=gpt2").run.model.config == {"vocab_size": 256}
    assert resolved("model.architecture=gpt2", "data.tokenizer=other").run.model.config == {"vocab_size": 1000}
    given = resolved("model.architecture=gpt2", "model.config={vocab_size = 300}")
    assert given.run.model.config == {"vocab_size": 300}


def test_a_cpu_gets_attention_by_matmuls_for_short_sequences_only() -> None:
    assert resolved("data.sequence_length=128").run.model.attention is Attention.MATMUL
    assert resolved("data.sequence_length=1024").run.model.attention is Attention.SDPA
    assert resolved("data.sequence_length=128", facts=on(device="cuda")).run.model.attention is Attention.SDPA


def test_a_cpu_gets_the_fused_attention_in_fp32_of_any_length() -> None:
    assert resolved("data.sequence_length=128", "precision=fp32").run.model.attention is Attention.SDPA
    measured = replace(FACTS, precision=Choice(value=Precision.FP32, reason="measured"))
    assert resolved("data.sequence_length=128", facts=measured).run.model.attention is Attention.SDPA


def test_an_attention_that_the_architecture_has_not_is_refused_with_those_that_it_has() -> None:
    plain = replace(FACTS, model=replace(FACTS.model, attentions=(Attention.EAGER,)))
    assert resolved(facts=plain).run.model.attention is Attention.EAGER
    with pytest.raises(ConfigError) as error:
        resolved("model.attention=matmul", facts=plain)
    assert str(error.value) == '`model.attention = "matmul"` is not offered by this architecture. Use "eager".'


def test_a_large_model_gets_a_small_micro_batch_on_an_accelerator() -> None:
    large = ModelFacts(parameters=7 * 10**9, hidden=4096, layers=32, vocabulary=32_000, context=4096, attentions=tuple(Attention))
    facts = replace(on(device="cuda", memory_bytes=141 * 10**9), model=large)
    settings = ("batch.global=64", "data.sequence_length=2048")
    assert resolved(*settings, facts=facts).run.batch.micro < resolved(*settings, facts=on(device="cuda")).run.batch.micro


def test_fine_tuning_starts_with_a_small_learning_rate() -> None:
    assert resolved("model.path=with-tokenizer").run.optimizer.learning_rate == 2e-5


def test_nothing_held_out_means_no_evaluation() -> None:
    facts = replace(FACTS, data=replace(FACTS.data, evaluation_tokens=0))
    assert resolved(facts=facts).run.evaluation.every_updates == 0

"""`halfstep train` from the configuration to the folder of the run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from train_command import TEXT, Train, command, environment
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from halfstep.config.options import Precision
from halfstep.precision.trial import Trial
from halfstep.train.corpus import Text, unigram_entropy

BF16 = Precision.BF16
BOTH = [Precision.FP32, BF16]


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def losses(path: str) -> list[float]:
    return [line["loss"] for line in lines(path)]


def test_a_run_leaves_everything_in_its_folder(train_apart: Train) -> None:
    said = train_apart("evaluation.every_updates=3")
    assert said.code == 0, said.err
    assert sorted(path.name for path in Path("run").iterdir()) == [
        "checkpoints",
        "config.toml",
        "events",
        "ledger.jsonl",
        "log.jsonl",
        "model",
        "report.html",
        "run.json",
    ]
    assert [line["kind"] for line in lines("run/log.jsonl")] == [*["update"] * 3, "evaluation"] * 2
    assert [entry["applied"] for entry in lines("run/ledger.jsonl")] == [True] * 6
    record = json.loads(Path("run/run.json").read_text())
    assert record["status"] == "finished"
    assert record["summary"]["applied_updates"] == record["summary"]["planned_updates"] == 6
    assert record["choices"]["batch.micro"] == {"value": 2, "reason": "asked for"}
    assert "precision" in record["engine"]
    events = EventAccumulator("run/events").Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


def test_the_precision_is_measured_once_for_the_same_weights_and_data(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def trials(*_: Any, **__: Any) -> dict[Precision, Trial]:
        measured.append("once more")
        return {name: Trial(precision=name, seconds=(3.0, 3.0) if name is BF16 else (9.0, 9.0), losses=(1.0,)) for name in BOTH}

    monkeypatch.setattr("halfstep.precision.select.candidates", lambda device: BOTH)
    monkeypatch.setattr("halfstep.precision.select.run_trials", trials)
    for folder, seed, times in (("run1", 1, 1), ("run2", 1, 1), ("run3", 2, 2)):
        said = train("precision=auto", f"run.folder={folder}", f"run.seed={seed}", "limits.updates=1")
        assert said.code == 0, said.err
        choice = json.loads(Path(folder, "run.json").read_text())["choices"]["precision"]
        assert choice["value"] == "bf16"
        assert ("; measured on " in choice["reason"]) is (folder == "run2")
        assert len(measured) == times


def test_the_report_is_on_stdout_and_the_progress_on_stderr(train: Train) -> None:
    said = train()
    assert [line.split()[0] for line in said.out.splitlines()] == [
        "finished",
        "updates",
        "skipped",
        "tokens",
        "rate",
        "memory",
        "loss",
        "kept",
    ]
    assert "updates     6 applied of 6 planned\nskipped     none\ntokens      1,488 in " in said.out
    assert re.match(r"update 1 of 6, loss \d\.\d{3}, [\d,]+ tokens/s, \d+:\d\d left, \d\.\d\d GB\n", said.err)
    assert "update 6 of 6, loss " in said.err


def test_the_saved_model_is_the_trained_one(train: Train) -> None:
    assert train("evaluation.every_updates=6").code == 0
    model = AutoModelForCausalLM.from_pretrained("run/model")
    held_out = TEXT[-round(0.1 * len(TEXT)) :]
    held_out = TEXT[TEXT.rfind("\n", 0, len(TEXT) - len(held_out)) + 1 :]
    ids = torch.tensor(list(held_out.encode()))
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 31):
            window = ids[start : start + 32]
            logits = model(input_ids=window[None, :-1]).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
            count += len(window) - 1
    assert total / count == pytest.approx(lines("run/log.jsonl")[-1]["loss"], rel=1e-5)
    summary = json.loads(Path("run/run.json").read_text())["summary"]
    assert summary["final"]["nats_per_byte"] == pytest.approx(total / len(held_out), rel=1e-5)
    assert summary["unigram_nats_per_byte"] == unigram_entropy(
        [Text(name="", content=np.frombuffer(held_out.encode(), dtype=np.uint8))]
    )


def test_the_same_seed_gives_the_same_run_bitwise(train: Train) -> None:
    assert train("--run", "one").code == train("--run", "two").code == 0
    assert Path("one/model/model.safetensors").read_bytes() == Path("two/model/model.safetensors").read_bytes()
    assert train("--run", "three", "run.seed=1").code == 0
    assert Path("one/model/model.safetensors").read_bytes() != Path("three/model/model.safetensors").read_bytes()


def test_micro_batches_do_not_change_the_updates(train: Train) -> None:
    assert train("--run", "one", "batch.micro=8").code == train("--run", "two", "batch.micro=1").code == 0
    assert losses("one/log.jsonl") == pytest.approx(losses("two/log.jsonl"), rel=1e-5)


def test_the_configuration_in_the_folder_runs_the_same_again(train: Train) -> None:
    assert train("--run", "one").code == train("--run", "two", config="one/config.toml").code == 0
    assert losses("one/log.jsonl") == losses("two/log.jsonl")


def test_the_loss_falls_below_the_unigram_entropy(train: Train) -> None:
    assert train("limits.updates=120", "optimizer.learning_rate=0.02").code == 0
    summary = json.loads(Path("run/run.json").read_text())["summary"]
    assert summary["final"]["nats_per_byte"] < 0.8 * summary["unigram_nats_per_byte"]


def test_print_config_shows_reasons_and_writes_nothing(train: Train, place: Path) -> None:
    said = train("--print-config", "precision=auto")
    assert said.code == 0
    assert '[batch]\nglobal = 8\nmicro = 2\ntail = "step"  # no sample is lost' in said.out
    assert re.match(r'precision = "(fp32|bf16|fp16)"  # .+', said.out)
    assert sorted(path.name for path in place.iterdir()) == ["text.txt", "tiny.toml"]


def test_tokens_end_a_run(train: Train) -> None:
    assert "updates     2 applied of 2 planned" in train("limits.tokens=400").out


def test_epochs_end_a_run_after_a_shorter_last_update(train: Train, place: Path) -> None:
    settings = ("limits={epochs=2}", "evaluation.every_updates=0")
    said = train(*settings)
    assert said.out.startswith("finished    2 epochs of the data are done\n")
    weights = [line["weight"] for line in lines("run/log.jsonl")]
    held_out = json.loads(Path("run/run.json").read_text())["choices"]["evaluation.share"]["value"]
    assert sum(weights) == 2 * (len(TEXT) - len(TEXT[TEXT.rfind("\n", 0, len(TEXT) - round(held_out * len(TEXT))) + 1 :]) - 1)
    assert weights[-1] < weights[0]


def test_the_clock_ends_a_run(train: Train) -> None:
    said = train("limits={minutes=0.0001}")
    assert said.out.startswith("finished    0.0001 minutes are over\nupdates     1 applied\n")


def test_without_files_it_reads_pythons_own_library(train: Train) -> None:
    (place_config := Path("model.toml")).write_text(
        Path("tiny.toml").read_text().replace('files = "text.txt"\n', "").replace("updates = 6", "updates = 2")
    )
    said = train("evaluation.share=0.0002", config=str(place_config))
    assert said.code == 0
    assert "unigram entropy" in said.out
    assert json.loads(Path("run/run.json").read_text())["config"]["data"]["corpus"] == "python-stdlib"


@pytest.fixture
def model_folder(place: Path) -> Path:
    """A tiny LLaMA with a tokenizer of its own, as Hugging Face keeps one."""
    words = Tokenizer(models.BPE(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>", "</s>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    tokenizer.save_pretrained("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained("llama")
    return place / "llama"


def test_a_local_folder_is_trained_on_in_fp32_and_saved_with_its_tokenizer(train: Train, model_folder: Path) -> None:
    Path("folder.toml").write_text(
        'precision = "fp32"\n[model]\npath = "llama"\n[data]\nfiles = "text.txt"\n[limits]\nupdates = 3\n[run]\nfolder = "run"\n'
    )
    said = train(config="folder.toml")
    assert said.code == 0, said.err
    saved = AutoModelForCausalLM.from_pretrained("run/model")
    assert saved.dtype == torch.float32
    assert AutoTokenizer.from_pretrained("run/model").eos_token == "</s>"
    config = json.loads(Path("run/run.json").read_text())["config"]
    assert (config["data"]["tokenizer"], config["data"]["sequence_length"]) == ("llama", 64)


def test_two_processes_equal_one(train: Train, train_apart: Train) -> None:
    settings = ("limits={epochs=2}", "batch.micro=1", "batch.global=6", "evaluation.every_updates=10")
    assert train(*settings, "--run", "one").code == 0
    said = train_apart(*settings, "--run", "two", "--processes", "2")
    assert said.code == 0, said.err
    assert said.out.count("finished") == said.err.count("update 1 of") == 1
    one, two = lines("one/log.jsonl"), lines("two/log.jsonl")
    assert [line.get("weight") for line in one] == [line.get("weight") for line in two]
    assert losses("one/log.jsonl") == pytest.approx(losses("two/log.jsonl"), rel=1e-4)
    assert json.loads(Path("two/run.json").read_text())["config"]["processes"] == 2


def test_several_ranks_say_an_error_once(train_apart: Train, place: Path) -> None:
    said = train_apart("--processes", "2", "data.files=no.txt")
    assert (said.code, said.out, said.err) == (2, "", "halfstep: `data.files`: no.txt does not exist.\n")
    assert sorted(path.name for path in place.iterdir()) == ["text.txt", "tiny.toml"]


@pytest.mark.parametrize(("number", "words"), [(signal.SIGINT, ()), (signal.SIGTERM, ()), (signal.SIGINT, ("--processes", "2"))])
def test_a_signal_ends_a_run_after_its_update_with_everything_saved(
    place: Path, number: signal.Signals, words: tuple[str, ...]
) -> None:
    settings = ("limits.updates=1000000", "evaluation.every_updates=0")
    with subprocess.Popen(
        command(*settings, *words), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        assert any(line.startswith("update 1 of 1,000,000") for line in running.stderr)
        running.send_signal(number)
        out, err = running.communicate(timeout=120)
    assert running.returncode == 128 + number, err
    assert out.startswith("interrupted " + ("Ctrl-C" if number is signal.SIGINT else "SIGTERM"))
    record = json.loads(Path("run/run.json").read_text())
    assert record["status"] == "interrupted"
    assert record["summary"]["applied_updates"] == len(lines("run/ledger.jsonl")) == len(lines("run/log.jsonl"))
    AutoModelForCausalLM.from_pretrained("run/model")


def test_a_run_that_diverges_stops_with_a_cause_and_keeps_its_ledger(train: Train) -> None:
    settings = ("optimizer={name='sgd', learning_rate=1e30, clip_norm=0}", "limits.updates=100")
    said = train(*settings, "evaluation.every_updates=10")
    assert (said.code, said.out) == (1, "")
    assert said.err.splitlines()[-1].startswith("halfstep: Stopped at update 26: skipped 25 updates in a row (")
    entries = lines("run/ledger.jsonl")
    assert [entry["applied"] for entry in entries] == [True, *[False] * 25]
    assert all(entry["cause"] for entry in entries[1:])
    assert json.loads(Path("run/run.json").read_text())["status"] == "failed"
    assert not Path("run/best").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the size of files stands for a full disk")
def test_a_full_disk_is_a_sentence_and_what_was_saved_stays(train_apart: Train) -> None:
    settings = ("model.config.intermediate_size=1024", "evaluation.every_updates=0", "run.tensorboard=false")
    said = train_apart(*settings, largest_file=100_000)
    assert said.code == 2
    assert said.out == ""
    assert said.err.splitlines()[-1] == (
        "halfstep: run/model cannot be written: the disk is full. What was saved before is still there."
    )
    assert len(lines("run/log.jsonl")) == 6
    assert json.loads(Path("run/run.json").read_text())["status"] == "failed"
    assert sorted(path.name for path in Path("run").iterdir()) == [
        "checkpoints",
        "config.toml",
        "ledger.jsonl",
        "log.jsonl",
        "run.json",
    ]


def test_help_imports_neither_torch_nor_what_is_slow() -> None:
    code = (
        "import sys\nfrom halfstep.cli.main import main\n"
        "try:\n    main(['train', '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print(sorted({'torch', 'pydantic', 'rich', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: halfstep train")
    assert done.stdout.splitlines()[-1] == "[]"

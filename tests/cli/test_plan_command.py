import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from halfstep.cli.main import main
from halfstep.errors import ModelError
from halfstep.plan.calibration import Calibration, keep
from halfstep.plan.reading import holds_tokenizer, tokens_of

LLAMA = ("llama-7b", "--gpu", "A100-80GB")
SMALL = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 2, "n_positions": 32, "vocab_size": 128}
WITHOUT_TORCH = """
import sys
from halfstep.cli.main import main
code = main({words!r})
print(code, 'torch' in sys.modules, 'pydantic' in sys.modules, file=sys.stderr)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "halfstep"


def planned(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main(["plan", *words, "--format", "json"]) == code
    return json.loads(capsys.readouterr().out)


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["plan", *words]) == code
    return capsys.readouterr().out


def test_the_closed_form_imports_no_torch() -> None:
    words = ["plan", *LLAMA, "--gpus", "8"]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH.format(words=words)], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["0", "False", "False"]


def test_text_shows_plans_bill_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, *LLAMA, "--gpus", "8", "--global-batch", "256", "--seq", "4096")
    assert "llama-7b: 6.738 billion parameters, adamw\n8 x A100-SXM-80GB, 78.8 GiB that torch can use each" in text
    assert "256 sequences of 4096 tokens an update" in text
    for item in ("parameters", "gradients", "optimizer states", "gathered parameters", "activations", "logits and loss"):
        assert f"\n  {item} " in text
    for part in ("peak in the loss:", "of context =", "Time of an update of plan 1:", "matrix products", "tokens/s"):
        assert part in text
    assert "What would make it fit" not in text


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *LLAMA, "--gpus", "8", "--global-batch", "256")
    assert (found["parameters"], found["device"], found["traced"]) == (6_738_415_616, "A100-SXM-80GB", None)
    first = found["plans"][0]
    assert first["verdict"] == "fits"
    low, middle, high = first["tokens_per_s"]
    assert low < middle < high
    phases = first["bill"]["phases"]
    assert first["memory"]["allocated_bytes"] == pytest.approx(sum(phases[first["memory"]["peak_phase"]].values()))


def test_does_not_fit_is_an_answer_with_what_would_make_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, *LLAMA, "--global-batch", "8", code=1)
    assert "1. does not fit  fp32 checkpointed" in text
    assert "What would make it fit:\n" in text
    assert "  2 devices (`--gpus 2`): " in text


def test_images_are_counted_for_a_convolutional_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert "images/s" in told(capsys, "resnet50", "--gpu", "V100-32GB", "--global-batch", "256")


def test_an_image_is_as_many_tokens_as_it_has_patches_and_counts_once(capsys: pytest.CaptureFixture[str]) -> None:
    first = planned(capsys, "vit-base", "--gpu", "H100", "--micro-batch", "64")["plans"][0]
    assert (first["recipe"]["micro_batch"], first["recipe"]["sequence"]) == (64, 197)
    assert first["tokens_per_s"][1] == pytest.approx(64 / first["time"]["update_s"])
    assert first["bill"]["phases"]["loss"]["activations"] > 2e9


def test_a_configuration_of_train_says_model_batch_and_precision(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys = "\n".join(f"{key} = {value}" for key, value in SMALL.items() if key != "model_type")
    text = f'precision = "fp32"\n[model]\narchitecture = "gpt2"\n[model.config]\n{keys}\n[batch]\nglobal = 32\nmicro = 8\n'
    (tmp_path / "run.toml").write_text(text + "[data]\nsequence_length = 16\n[optimizer]\nname = 'sgd'\n")
    found = planned(capsys, str(tmp_path / "run.toml"), "--gpu", "T4")
    recipe = found["plans"][0]["recipe"]
    names = ("precision", "micro_batch", "accumulation", "sequence", "optimizer", "loss")
    assert [recipe[name] for name in names] == ["fp32", 8, 4, 16, "sgd", "chunked"]


def test_what_a_configuration_leaves_out_is_what_train_would_take(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[model]\n[lora]\nrank = 4\ndropout = 0.1\n")
    found = planned(capsys, str(tmp_path / "run.toml"), "--gpu", "T4")
    recipe = found["plans"][0]["recipe"]
    names = ("adapter", "adapts_all", "adapter_dropout", "sequence", "loss")
    assert [recipe[name] for name in names] == ["lora", True, True, 256, "chunked"]
    assert recipe["trainable"] < found["parameters"]


def test_the_vocabulary_is_that_of_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert holds_tokenizer(str(tmp_path))
    assert tokens_of(str(tmp_path)) == 3
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json that tells how many tokens there are"):
        tokens_of(str(tmp_path / "elsewhere"))


def test_this_machine_is_planned_for_as_it_was_measured(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    rates = {"fp32": 0.2, "bf16": 0.4}
    calibration = Calibration(
        device="a CPU",
        torch="2.13.0",
        threads=2,
        memory_bytes=24 * 2**30,
        matmul_tflops=rates,
        efficiency={"fp32": 0.8, "bf16": 0.8},
        convolutions=0.5,
        bandwidth_gbs=10.0,
        launch_us=5.0,
        measured="2026-11-29",
    )
    keep(calibration, cache)
    text = told(capsys, "gpt2", "--micro-batch", "1", "--seq", "128")
    assert "1 x a CPU, 24.0 GiB that torch can use (measured on 2026-11-29 with torch 2.13.0)" in text


def test_the_guides_table_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "llama-7b", "--explain-guide-table")
    assert "FP32, batch 2\n  printed:  380 tokens/s, 78 GB\n  expected: 111.5 GB" in text
    assert "parameters, gradients and AdamW states alone are 107.8 GB" in text
    assert "does not shrink the states" in text


MISTAKES = {
    "lama-7b is neither a known model nor a folder or config.json that exists. Did you mean llama-7b?": (
        "lama-7b",
        "--gpu",
        "A100",
    ),
    "no.json does not exist: a Hugging Face model folder holds a config.json.": ("no.json", "--gpu", "A100"),
    "The configuration file no.toml does not exist.": ("no.toml", "--gpu", "A100"),
    "`--gpu A1000` is no device that the planner knows. Did you mean A10?": ("gpt2", "--gpu", "A1000"),
    "This machine was not measured yet: name a device, as `--gpu A100-80GB`, or measure with `--measure`.": ("gpt2",),
    "A global batch of 100 cannot be split over 8 devices. Use 96 or 104.": (*LLAMA, "--gpus", "8", "--global-batch", "100"),
    "`--gpus 0` must be above 0.": (*LLAMA, "--gpus", "0"),
    '`--precision` is \'half\', which is not one of "fp32", "fp16", "bf16", "bf16-pure".': (*LLAMA, "--precision", "half"),
    "`--measure` measures this machine, and `--gpu` names another. Leave out one of them.": (*LLAMA, "--measure"),
    "`--weights` is for weights that are not trained: give `--lora RANK` too.": (*LLAMA, "--weights", "nf4"),
    "`--lora 8`: resnet50 has no attention to put adapters on. Leave it out.": ("resnet50", "--gpu", "T4", "--lora", "8"),
    "`--trace` cannot count `--optimizer adafactor`. Leave out one of them.": (*LLAMA, "--trace", "--optimizer", "adafactor"),
    "`--seq 4096` is longer than the 1024 positions that gpt2 has. Use 1024 or less.": ("gpt2", "--gpu", "T4", "--seq", "4096"),
    "`--seq 9` has no effect: vit-base takes images, whose length is its own. Leave it out.": (
        "vit-base",
        "--gpu",
        "T4",
        "--seq",
        "9",
    ),
}


@pytest.mark.parametrize(("message", "words"), MISTAKES.items())
def test_mistakes_are_told_in_one_sentence(message: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"halfstep: {message}\n")

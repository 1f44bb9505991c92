"""Rows, chats and completions through the real command: packed or filled up, and every fault of a file in a sentence."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from train_command import Said, Train
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = [{"text": f"document {number}: " + "word " * (number % 7), "label": "x"} for number in range(60)]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"{number} + 1 = ?" + " please" * (number % 3)},
            {"role": "assistant", "content": str(number + 1)},
        ]
    }
    for number in range(60)
]
COMPLETIONS = [{"prompt": f"after {number} comes ", "completion": str(number + 1)} for number in range(60)]
AUTOMATIC = ("batch.global=auto", "batch.micro=auto", "limits.updates=1", "device=cpu")
SHORT = ("data.sequence_length=64", "batch.global=4", "limits.updates=3")


@pytest.fixture
def tokenizer(place: Path) -> str:
    """A folder with a tokenizer of bytes that knows chats."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(place / "tokenizer")
    return "data.tokenizer=tokenizer"


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return f"data.files={path.name}"


def configuration(place: Path, folder: str = "run") -> str:
    return (place / folder / "config.toml").read_text(encoding="utf-8")


def losses(place: Path, kind: str, folder: str = "run") -> list[float]:
    log = map(json.loads, (place / folder / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [entry["loss"] for entry in log if entry["kind"] == kind]


def assert_refused(said: Said, sentence: str) -> None:
    assert said.code == 2, said.err
    assert sentence in said.err
    assert "Traceback" not in said.err


def test_rows_of_text_are_packed_and_the_padding_is_told(place: Path, train: Train) -> None:
    assert train(lines(place / "texts.jsonl", TEXTS), *SHORT, "data.packing=true").code == 0
    told = configuration(place)
    assert 'format = "jsonl"  # by the names of the files\n' in told
    assert 'kind = "text"  # no columns of a chat or of completions: text, label\n' in told
    assert "packing = true\n" in told
    assert "places are padding" in told
    assert "0 of 54 documents are longer than 64 tokens and were split; 0.0% of" in told


def test_on_a_cpu_documents_of_about_one_length_are_filled_up(place: Path, train: Train) -> None:
    assert train(lines(place / "texts.jsonl", TEXTS), "data.sequence_length=64", *AUTOMATIC).code == 0
    told = configuration(place)
    assert "packing = false  # on a CPU a packed token pays for attention over its whole sequence; documents of" in told
    assert "global = 2  # 56 tokens an update, of a text of 54 sequences\n" in told


def test_packed_and_filled_up_held_out_rows_have_the_same_loss(place: Path, train: Train) -> None:
    files = lines(place / "texts.jsonl", TEXTS)
    words = (files, *SHORT, "evaluation.every_updates=1", "optimizer.learning_rate=1e-12", "evaluation.share=0.5")
    assert train(*words, "data.packing=true").code == 0
    assert train(*words, "data.packing=false", "run.folder=padded").code == 0
    assert losses(place, "evaluation") == pytest.approx(losses(place, "evaluation", "padded"), rel=1e-5)
    shares = [line for line in configuration(place, "padded").splitlines() if line.startswith("# data.padding:")]
    assert len(shares) == 1


def test_csv_gives_the_same_run_as_json_lines(place: Path, train: Train) -> None:
    with (place / "texts.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(TEXTS)
    assert train(lines(place / "texts.jsonl", TEXTS), *SHORT).code == 0
    assert train("data.files=texts.csv", *SHORT, "run.folder=csv").code == 0
    assert losses(place, "update") == losses(place, "update", "csv")


def test_chats_are_found_by_their_column_and_only_answers_count(place: Path, train: Train, tokenizer: str) -> None:
    files = lines(place / "chats.jsonl", CHATS)
    whole = ("data.sequence_length=64", "batch.global=4", "limits.epochs=1", "evaluation.files=chats.jsonl")
    assert train(files, tokenizer, *whole, "model.config.vocab_size=300", "limits.updates=1000").code == 0
    assert 'kind = "chat"  # by the columns of the first row: messages\n' in configuration(place)
    log = map(json.loads, (place / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines())
    answered = sum(entry["weight"] for entry in log if entry["kind"] == "update")
    assert answered == sum(len(str(number + 1)) + len(["<|im_end|>", "\n"]) for number in range(60))


def test_completions_are_found_by_their_columns(place: Path, train: Train, tokenizer: str) -> None:
    assert train(lines(place / "rows.jsonl", COMPLETIONS), tokenizer, *SHORT, "model.config.vocab_size=300").code == 0
    assert 'kind = "completion"  # by the columns of the first row: prompt, completion\n' in configuration(place)


def test_the_second_run_reads_the_kept_tokens(place: Path, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    files = lines(place / "texts.jsonl", TEXTS)
    assert train(files, *SHORT).code == 0
    kept = {path: path.stat().st_mtime_ns for path in (place / "cache").rglob("tokens")}
    assert train(files, *SHORT, "run.folder=again").code == 0
    assert {path: path.stat().st_mtime_ns for path in (place / "cache").rglob("tokens")} == kept
    assert len(kept) == 1
    assert losses(place, "update") == losses(place, "update", "again")


def test_two_ranks_see_what_one_sees(place: Path, train_apart: Train) -> None:
    words = (lines(place / "texts.jsonl", TEXTS), *SHORT, "batch.micro=2", "model.loss_chunk=16")
    assert train_apart(*words).code == 0
    two = train_apart(*words, "processes=2", "run.folder=two")
    assert two.code == 0, two.err
    assert losses(place, "update", "two") == pytest.approx(losses(place, "update"), rel=1e-5)


def test_a_column_that_is_not_there_is_answered_with_those_that_are(place: Path, train: Train) -> None:
    said = train(lines(place / "texts.jsonl", TEXTS), "data.columns=txt")
    assert_refused(said, "texts.jsonl, line 1 has no column `txt`. Its columns are `text`, `label`.")


def test_a_broken_line_is_numbered(place: Path, train: Train) -> None:
    (place / "a.jsonl").write_text('{"text": "x"}\n{"text"\n')
    assert_refused(train("data.files=a.jsonl"), "a.jsonl, line 2 is not JSON: Expecting ':' delimiter at character 8.")


def test_an_empty_row_is_named(place: Path, train: Train) -> None:
    said = train(lines(place / "a.jsonl", [{"text": "x"}, {"text": " "}]))
    assert_refused(said, "a.jsonl, line 2: `text` is empty.")


def test_text_that_is_not_utf8_is_named(place: Path, train: Train) -> None:
    (place / "a.csv").write_bytes(b"text\nx\ncaf\xe9\n")
    assert_refused(train("data.files=a.csv"), "a.csv, line 3 is not UTF-8: byte 3 does not belong there. Convert the file.")


def test_a_chat_without_an_assistant_is_named(place: Path, train: Train, tokenizer: str) -> None:
    chats = [*CHATS[:2], {"messages": CHATS[0]["messages"][:1]}]
    said = train(lines(place / "chats.jsonl", chats), tokenizer, "model.config.vocab_size=300")
    assert_refused(said, "chats.jsonl, line 3: the chat has no assistant turn, so there is nothing to learn from it")


def test_chats_need_a_tokenizer(place: Path, train: Train) -> None:
    said = train(lines(place / "chats.jsonl", CHATS))
    assert_refused(said, '`data.kind = "chat"` needs a tokenizer, and `data.tokenizer` is "bytes". Give its folder.')


def test_samples_longer_than_the_context_are_cut_dropped_or_split_as_asked(place: Path, train: Train) -> None:
    files = lines(place / "texts.jsonl", [{"text": "x" * (30 + 10 * (number % 2))} for number in range(40)])
    for too_long, done in (("cut", "cut"), ("drop", "dropped"), ("split", "split")):
        words = (files, "data.sequence_length=32", "limits.updates=1", f"data.too_long={too_long}", f"run.folder={too_long}")
        assert train(*words).code == 0
        assert f"documents are longer than 32 tokens and were {done};" in configuration(place, too_long)


def test_when_nothing_fits_it_is_said(place: Path, train: Train) -> None:
    said = train(lines(place / "a.jsonl", [{"text": "x" * 90}] * 3), "data.sequence_length=32", "data.too_long=drop")
    assert_refused(said, "No document is left to train on: 3 of 3 documents are longer than 32 tokens and were dropped;")


def test_settings_that_do_not_fit_the_files_are_refused(place: Path, train: Train) -> None:
    assert_refused(train("data.packing=true"), "`data.packing` has no effect on text files: they are one stream of tokens")
    said = train("data.files=['a.csv', 'b.jsonl']")
    assert_refused(said, "`data.files` names files of several kinds (csv, jsonl). Name files of one kind.")
    said = train("data.files=a.jsonl")
    assert_refused(said, "`data.files`: a.jsonl does not exist.")
    said = train(lines(place / "rows.jsonl", COMPLETIONS), "data.columns=prompt")
    assert_refused(said, '`data.columns` names 1 columns, and data of the kind "completion" have 2, as ["prompt", "completion"].')


def test_a_run_can_be_run_again_from_its_own_configuration(place: Path, train: Train) -> None:
    assert train(lines(place / "texts.jsonl", TEXTS), *SHORT).code == 0
    assert train("run.folder=again", config="run/config.toml").code == 0
    assert losses(place, "update") == losses(place, "update", "again")

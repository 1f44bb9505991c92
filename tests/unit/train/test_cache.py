"""Documents are made once, kept whole or not at all, and read without being loaded."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from halfstep.errors import UsageError
from halfstep.train.cache import ABOUT, fingerprint, kept_documents, key_of
from halfstep.train.chat import Sample
from halfstep.train.documents import Documents

SAMPLES = [Sample(tokens=[1, 2, 70_000], counted=[False, True, True]), Sample(tokens=[4], counted=[True])]


def tokenizer(*words: str, template: str | None = None) -> Any:
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(("<unk>", *words))}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    fast.chat_template = template
    return fast


def contents(documents: Documents) -> list[tuple[list[int], list[bool]]]:
    spans = [slice(start, start + length) for start, length in zip(documents.starts, documents.lengths, strict=True)]
    return [(documents.tokens[span].tolist(), documents.counted[span].tolist()) for span in spans]


def never() -> Iterator[Sample]:
    raise AssertionError("made again")


def test_documents_are_made_once_and_then_mapped(tmp_path: Path) -> None:
    made, was_there = kept_documents("key", lambda: SAMPLES, root=tmp_path)
    again, is_there = kept_documents("key", never, root=tmp_path)
    assert (was_there, is_there) == (False, True)
    assert contents(made) == contents(again) == [(sample.tokens, sample.counted) for sample in SAMPLES]
    assert isinstance(again.tokens, np.memmap)
    assert isinstance(again.counted, np.memmap)


def test_what_is_damaged_is_made_again(tmp_path: Path) -> None:
    kept_documents("key", lambda: SAMPLES, root=tmp_path)
    (tmp_path / "key" / "tokens").write_bytes(b"\0")
    made, was_there = kept_documents("key", lambda: SAMPLES, root=tmp_path)
    assert not was_there
    assert contents(made)[1] == ([4], [True])
    (tmp_path / "key" / ABOUT).write_text("{")
    assert not kept_documents("key", lambda: SAMPLES, root=tmp_path)[1]


def test_an_error_while_making_leaves_nothing_and_is_passed_on(tmp_path: Path) -> None:
    def broken() -> Iterator[Sample]:
        yield SAMPLES[0]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        kept_documents("key", broken, root=tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_no_sample_is_no_error(tmp_path: Path) -> None:
    assert len(kept_documents("key", list, root=tmp_path)[0]) == 0


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as error:
        kept_documents("key", lambda: SAMPLES, root=tmp_path / "file")
    assert str(error.value) == f"{tmp_path}/file/key cannot be written: File exists."


def _make_slowly(root: str, started: Any, results: Any) -> None:
    def make() -> Iterator[Sample]:
        for number in range(3000):
            yield Sample(tokens=[number], counted=[True])

    started.wait()
    documents, was_there = kept_documents("key", make, root=Path(root))
    results.put((documents.tokens.tolist() == list(range(3000)), was_there))


@pytest.mark.slow
def test_of_processes_at_once_one_makes_it_and_all_read_the_same(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    started, results = spawn.Barrier(2), spawn.Queue()
    processes = [spawn.Process(target=_make_slowly, args=(str(tmp_path), started, results)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    results.close()
    results.join_thread()
    assert [same for same, _ in found] == [True] * 2
    assert sorted(was_there for _, was_there in found) == [False, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]


def test_the_key_is_of_content_tokenizer_and_settings_and_not_of_names(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("x")
    second.write_text("x")
    key = key_of([first], tokenizer("x"), {"length": 8})
    assert key_of([second], tokenizer("x"), {"length": 8}) == key
    assert key_of([first], tokenizer("y"), {"length": 8}) != key
    assert key_of([first], tokenizer("x", template="{{ 1 }}"), {"length": 8}) != key
    assert key_of([first], tokenizer("x"), {"length": 9}) != key
    assert key_of([first, second], tokenizer("x"), {"length": 8}) != key
    second.write_text("y")
    assert key_of([second], tokenizer("x"), {"length": 8}) != key


def test_every_file_of_a_folder_is_in_the_key(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("x")
    key = key_of([tmp_path / "data"], tokenizer(), {})
    (tmp_path / "data" / "b").write_text("y")
    assert key_of([tmp_path / "data"], tokenizer(), {}) != key


def test_the_fingerprint_of_a_tokenizer_outlives_its_folder(tmp_path: Path) -> None:
    made = tokenizer("x", "y", template="{{ messages }}")
    made.save_pretrained(tmp_path)
    assert fingerprint(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == fingerprint(made)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())

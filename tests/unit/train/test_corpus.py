"""Text from files and from the standard library, and how it is divided."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import DataError
from halfstep.train import corpus
from halfstep.train.corpus import (
    Joined,
    Text,
    byte_tokens,
    read_files,
    read_stdlib,
    samples_of,
    split,
    split_off,
    unigram_entropy,
)


def fault(*patterns: str) -> str:
    with pytest.raises(DataError) as error:
        read_files(patterns, key="data.files")
    return str(error.value)


def text_of(content: bytes, name: str = "a.txt") -> Text:
    return Text(name=name, content=np.frombuffer(content, dtype=np.uint8))


def texts(**contents: str) -> list[Text]:
    return [text_of(content.encode(), name) for name, content in contents.items()]


def contents(read: Iterable[Text]) -> list[bytes]:
    return [text.content[:].tobytes() for text in read]


def test_the_standard_library_is_read_in_the_same_order_every_time() -> None:
    first, second = read_stdlib(300_000), read_stdlib(300_000)
    assert [text.name for text in first] == [text.name for text in second]
    assert contents(first) == contents(second)


def test_the_standard_library_comes_without_tests_and_within_its_size() -> None:
    read = read_stdlib(1_000_000)
    assert sum(len(text.content) for text in read) <= 1_000_000
    assert not any({"test", "tests", "site-packages"} & set(Path(text.name).parts) for text in read)
    first = read[0]
    assert (Path(sysconfig.get_path("stdlib")) / first.name).read_bytes() == first.content[:].tobytes()


def test_files_come_in_the_order_of_the_patterns_and_each_once(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    read = read_files([f"{tmp_path}/c.md", f"{tmp_path}/*.txt", f"{tmp_path}/a.txt"], key="data.files")
    assert contents(read) == [b"c.md", b"a.txt", b"b.txt"]


def test_empty_files_that_a_pattern_matches_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("text")
    assert contents(read_files([f"{tmp_path}/*"], key="data.files")) == [b"text"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert fault(f"{tmp_path}/no.txt") == f"`data.files`: {tmp_path}/no.txt does not exist."


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    assert fault(f"{tmp_path}/a.txt") == f"`data.files`: {tmp_path}/a.txt is empty."
    assert fault(f"{tmp_path}/*.txt") == f'`data.files`: only empty files match "{tmp_path}/*.txt".'


def test_a_pattern_that_matches_nothing_is_named(tmp_path: Path) -> None:
    assert fault(f"{tmp_path}/*.txt") == f'`data.files`: no file matches "{tmp_path}/*.txt".'


def test_a_folder_is_answered_with_a_pattern(tmp_path: Path) -> None:
    assert fault(str(tmp_path)) == f'`data.files`: {tmp_path} is a folder. Use a pattern, as "{tmp_path}/**/*.txt".'


def test_whole_files_are_held_out_where_there_are_many() -> None:
    many = [text_of(b"x" * 100, f"{number}.txt") for number in range(50)]
    divided = split(many, 0.1)
    assert {text.name for text in divided.train} & {text.name for text in divided.held_out} == set()
    assert len(divided.held_out) == 5
    assert divided.how == "5 of 50 files, 10.0% of the text"


def test_another_file_does_not_change_which_of_the_others_are_chosen_first() -> None:
    many = [text_of(b"x" * 100, f"{number}.txt") for number in range(50)]
    chosen = {text.name for text in split(many, 0.1).held_out}
    more = {text.name for text in split([*many, text_of(b"x" * 100, "more.txt")], 0.1).held_out}
    assert len(chosen & more) >= 4


def test_a_single_file_gives_its_last_lines() -> None:
    divided = split(texts(a="one\ntwo\nthree\nfour\n"), 0.3)
    assert contents(divided.held_out) == [b"three\nfour\n"]
    assert contents(divided.train) == [b"one\ntwo\n"]
    assert divided.how == "the last 11 bytes of a, because whole files would be too much"


@given(st.text(min_size=1, max_size=60), st.floats(0.01, 0.9))
def test_dividing_one_file_loses_nothing_and_cuts_no_character(content: str, share: float) -> None:
    divided = split(texts(a=content), share)
    parts = [*divided.train, *divided.held_out]
    assert b"".join(contents(parts)) == content.encode()
    for part in contents(parts):
        part.decode()


def test_files_that_are_held_out_by_name_are_not_trained_on(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    both = read_files([f"{tmp_path}/*.txt"], key="data.files")
    divided = split_off(both, read_files([f"{tmp_path}/b.txt"], key="evaluation.files"))
    assert contents(divided.train) == [b"a.txt"]
    assert contents(divided.held_out) == [b"b.txt"]


def test_holding_out_everything_is_refused() -> None:
    with pytest.raises(DataError) as error:
        split_off(texts(a="text"), texts(a="text"))
    assert str(error.value) == ("Every file of `data.files` is also in `evaluation.files`: nothing is left to train on.")


@given(st.binary(min_size=1, max_size=200))
def test_the_unigram_entropy_is_that_of_the_definition(content: bytes) -> None:
    shares = [count / len(content) for count in Counter(content).values()]
    expected = -sum(share * math.log(share) for share in shares)
    assert unigram_entropy([text_of(content)]) == pytest.approx(expected, abs=1e-12)


def test_no_text_has_no_entropy() -> None:
    assert unigram_entropy([]) is None


def test_bytes_are_tokens_one_behind_the_other() -> None:
    assert byte_tokens(texts(a="ab", b="c")).tolist() == [97, 98, 99]
    assert byte_tokens([]).dtype == np.uint8


def pieces(*given: Text, end: int | None = None) -> list[list[int]]:
    return [sample.tokens for sample in samples_of(given, lambda text: [*map(ord, text)], end)]


def test_a_document_ends_with_the_tokenizers_end() -> None:
    assert pieces(*texts(a="ab", b="c"), end=0) == [[97, 98, 0], [99, 0]]
    assert pieces(*texts(a="ab", b="c")) == [[97, 98], [99]]


def test_long_texts_become_tokens_a_piece_of_whole_lines_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE_BYTES", 8)
    lines = "one\ntwo\nthree\nfour\n"
    assert ["".join(map(chr, piece)) for piece in pieces(*texts(a=lines))] == ["one\ntwo\n", "three\n", "four\n"]
    assert pieces(*texts(a=lines), end=0)[-1] == [*map(ord, "four\n"), 0]
    assert "".join(chr(token) for piece in pieces(*texts(a="zwölfäüö" * 9)) for token in piece) == "zwölfäüö" * 9


def test_text_that_is_mapped_is_the_text_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {"a.txt": b"first\n", "b.txt": b"second\n", "c.txt": b"third"}.items():
        (tmp_path / name).write_bytes(content)
    read = read_files([f"{tmp_path}/*"], key="data.files")
    monkeypatch.setattr(corpus, "IN_MEMORY_BYTES", 4)
    mapped = read_files([f"{tmp_path}/*"], key="data.files")
    assert contents(mapped) == contents(read)
    tokens = byte_tokens(mapped)
    assert isinstance(tokens, Joined)
    places = np.arange(len(tokens)).reshape(2, -1)
    assert tokens[places].tobytes() == b"first\nsecond\nthird"
    assert tokens[places].shape == places.shape
    assert byte_tokens(mapped[:1]) is mapped[0].content


LARGE = """
import json, resource, sys
from halfstep.train.corpus import byte_tokens, read_files, split, unigram_entropy
from halfstep.train.windows import Windows

held = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + 32 * 2**20, resource.RLIM_INFINITY))
divided = split(read_files(sys.argv[1:], key="data.files"), 0.3)
windows = Windows(byte_tokens(divided.train), 64)
ends = windows.__getitems__([0, len(windows) - 1])["input_ids"]
print(json.dumps([len(windows.tokens), unigram_entropy(divided.held_out), ends[:, 0].tolist()]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
@pytest.mark.parametrize("files", [1, 2])
def test_a_text_is_trained_on_that_does_not_fit_into_memory(tmp_path: Path, files: int) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(files)]
    for path in paths:
        path.write_bytes(b"ab\n" * (50 * 2**20 // files))
    words = [sys.executable, "-c", LARGE, *map(str, paths)]
    size, entropy, first = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert size == pytest.approx(0.7 * 150 * 2**20, rel=1e-6)
    assert entropy == pytest.approx(math.log(3))
    assert first == [ord("a"), ord("ab\n"[(size - 1) // 63 * 63 % 3])]


def test_a_text_that_is_not_utf8_is_named_for_a_tokenizer() -> None:
    with pytest.raises(DataError) as error:
        pieces(text_of(b"ab\xff"))
    assert str(error.value) == (
        'a.txt is not UTF-8: byte 2 does not belong there. Convert the file, or use `data.tokenizer = "bytes"`.'
    )


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(b"\x1f\x8b\x08\x00abc")
    assert fault(f"{tmp_path}/a.gz") == (
        f"`data.files`: {tmp_path}/a.gz is no text: there are zero bytes in it. Files with rows are known by their names: "
        ".jsonl, .csv, .parquet."
    )

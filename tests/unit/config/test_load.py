"""A TOML file and settings over it."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.config.load import load
from halfstep.errors import ConfigError


def fault(path: Path | None, *settings: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(path, settings)
    return str(error.value)


def test_settings_win_over_the_file_and_later_over_earlier(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('precision = "fp32"\n[batch]\nglobal = 8\nmicro = 4\n')
    written = load(file, ["batch.global=16", "batch.global = 32"])
    assert (written.batch.global_, written.batch.micro) == (32, 4)


def test_a_setting_that_is_no_toml_value_is_a_string() -> None:
    assert load(None, ["model.path=models/my llama"]).model.path == "models/my llama"


def test_a_setting_may_be_a_table() -> None:
    assert load(None, ["model.config={hidden_size = 8}", "model.config.num_hidden_layers=2"]).model.config == {
        "hidden_size": 8,
        "num_hidden_layers": 2,
    }


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    assert fault(tmp_path / "no.toml") == f"The configuration file {tmp_path / 'no.toml'} does not exist."


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    assert fault(tmp_path) == f"{tmp_path} is a folder: a configuration is a TOML file."


def test_broken_toml_is_named_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("batch = [")
    assert fault(file).startswith(f"{file} is not a TOML file: ")
    assert "line 1" in fault(file) or "end of document" in fault(file)


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xff\xfe\x00")
    assert fault(file) == f"{file} is not a TOML file: it is not text in UTF-8."


@pytest.mark.parametrize("setting", ["batch.global", "=3", "batch..micro=3"])
def test_a_setting_without_key_or_value_is_refused(setting: str) -> None:
    assert fault(None, setting) == f"`--set {setting}` is not a setting: it must be `key=value`, as `batch.global=64`."


def test_a_setting_below_a_value_is_refused() -> None:
    assert (
        fault(None, "precision=fp32", "precision.kind=fp32")
        == "`--set precision.kind=fp32` cannot be: `precision` is a value, not a section."
    )

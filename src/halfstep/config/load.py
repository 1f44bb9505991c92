"""From a TOML file and `--set key=value` settings to the configuration as the user wrote it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from halfstep.config.schema import Written, validate
from halfstep.errors import ConfigError

tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def load(path: Path | None, settings: Sequence[str] = ()) -> Written:
    """The configuration of the file with the settings laid over it.

    Args:
        path: a TOML file, or `None` for an empty configuration.
        settings: `section.key=value` strings, the later over the earlier. A value is read as TOML; what is no TOML
            value is a string, so that `precision=bf16` needs no quotes.

    Raises:
        ConfigError: the file cannot be read, or a key or value in it or in the settings is wrong.
    """
    table = {} if path is None else _read(path)
    for setting in settings:
        _lay_over(table, setting)
    return validate(table)


def _read(path: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"The configuration file {path} does not exist.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder: a configuration is a TOML file.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a TOML file: it is not text in UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not a TOML file: {error}.") from None
    return table


def _lay_over(table: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise ConfigError(f"`--set {setting}` is not a setting: it must be `key=value`, as `batch.global=64`.")
    for part in path[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"`--set {setting}` cannot be: `{part}` is a value, not a section.")
        table = inner
    table[path[-1]] = _value(text.strip())


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text

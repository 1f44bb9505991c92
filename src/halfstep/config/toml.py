"""Writes values and tables as TOML; reading is the standard library's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any


def toml_value(value: Any) -> str:
    """`value` as the user would write it in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, Enum)):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return str(value)  # dates and times, which are written as they print


def toml_key(key: str) -> str:
    """`key`, quoted where TOML wants it."""
    bare = key.replace("-", "").replace("_", "").isalnum() and key.isascii()
    return key if bare else json.dumps(key, ensure_ascii=False)


def toml_document(table: Mapping[str, Any], remarks: Mapping[str, str]) -> str:
    """A document with one section for each inner table; `None` is left out.

    Args:
        table: scalars and tables of scalars.
        remarks: by dotted key, what is to stand behind the value as a comment.
    """
    scalars = [_line((key,), value, remarks) for key, value in table.items() if not isinstance(value, Mapping)]
    blocks = [[f"[{key}]", *_lines(key, value, remarks)] for key, value in table.items() if isinstance(value, Mapping)]
    return "\n\n".join("\n".join(filter(None, block)) for block in [scalars, *blocks] if any(block)) + "\n"


def _lines(section: str, table: Mapping[str, Any], remarks: Mapping[str, str]) -> list[str]:
    return [_line((section, key), value, remarks) for key, value in table.items()]


def _line(path: tuple[str, ...], value: Any, remarks: Mapping[str, str]) -> str:
    remark = remarks.get(".".join(path), "")
    if value is None:
        return f"# {path[-1]} is not set: {remark}" if remark else ""
    setting = f"{toml_key(path[-1])} = {toml_value(value)}"
    return f"{setting}  # {remark}" if remark else setting

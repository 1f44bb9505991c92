"""From what a user names to a model's configuration: a known name, a `config.json`, a folder that holds one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from halfstep.errors import ModelError
from halfstep.plan.known_models import KNOWN

TOKENIZER = "tokenizer.json"


def config_of(name: str) -> Mapping[str, Any]:
    """The configuration of the model that the user names.

    Args:
        name: a known name, with or without a hub's owner before it, or the path of a `config.json` or of a folder with one.

    Raises:
        ModelError: it is none of them; the nearest known name is told.
    """
    key = re.sub(r"-(hf|uncased|cased)$", "", name.lower().rpartition("/")[2]).replace("_", "-")
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return _read(path / "config.json" if path.is_dir() else path)
    if key in KNOWN:
        return KNOWN[key]
    near = get_close_matches(key, KNOWN, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}?" if near else f"Known names are {', '.join(KNOWN)}."
    raise ModelError(f"{name} is neither a known model nor a folder or config.json that exists. {hint}")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: a Hugging Face model folder holds a config.json.") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}.") from None
    if not isinstance(told, dict):
        raise ModelError(f"{path} is not a model's configuration: it must be a JSON object with a `model_type`.")
    return told


def holds_tokenizer(folder: str) -> bool:
    """Whether a folder holds a tokenizer."""
    return (Path(folder) / TOKENIZER).is_file()


def tokens_of(folder: str) -> int:
    """How many tokens the tokenizer of a folder knows.

    Raises:
        ModelError: there is none that can be read.
    """
    try:
        told = json.loads((Path(folder) / TOKENIZER).read_text(encoding="utf-8"))
        added = [each["id"] + 1 for each in told["added_tokens"]]
        return int(max(len(told["model"]["vocab"]), *added, 1))
    except (OSError, ValueError, LookupError, TypeError):
        raise ModelError(
            f"{folder} holds no {TOKENIZER} that tells how many tokens there are: give `model.config.vocab_size`."
        ) from None

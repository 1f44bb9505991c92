"""What holds for every test: one thread, no cache of the user's, and nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("halfstep", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("halfstep")


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Rates that a test measures are not kept for the user, and those kept decide no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """torch's modes and the present folder are after a test what they were before it, and no evidence lies in that folder."""
    before = _modes()
    yield
    assert _modes() == before, "a test left one of torch's modes, or the present folder, changed"
    assert not Path("halfstep-evidence").exists(), "a test left evidence in the present folder; give the engine `evidence=`"


def _modes() -> dict[str, object]:
    return {
        "autocast": torch.is_autocast_enabled("cpu"),
        "gradients": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "float32 products": torch.get_float32_matmul_precision(),
        "folder": Path.cwd(),
    }

"""Tests that need a CUDA device are skipped where there is none, and say so; what engines switch is put back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu`, with the reason, where torch finds no CUDA device."""
    if torch.cuda.is_available():
        return
    reason = f"no CUDA device: torch {torch.__version__} " + (
        "was built without CUDA" if torch.version.cuda is None else "finds no GPU or no driver"
    )
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _float32_products_as_before() -> Iterator[None]:
    """Engines turn TF32 on for good."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def device() -> torch.device:
    """The GPU that torch uses unasked."""
    return torch.device("cuda", torch.cuda.current_device())

"""Faults in random layers: the module that makes the first bad value is named. The whole figure is in `benchmarks/`."""

from __future__ import annotations

import pytest
from benchmarks.watch_injections import inject


@pytest.mark.parametrize("seed", range(100, 116))
def test_the_layer_that_the_fault_was_put_into_is_named(seed: int) -> None:
    injection = inject(seed)
    assert injection.right, injection

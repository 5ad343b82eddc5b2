"""Placement of stages on the fake CUDA runtime's devices, and out-of-memory errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda import placement_cases
from tests.fake_cuda.build import can_build
from tests.fake_cuda.process import run

pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
)


@pytest.mark.extended
def test_stages_are_placed_on_devices(libraries: tuple[Path, Path]) -> None:
    names = [function.__name__ for function in placement_cases.PLACEMENT]
    assert run("placement_cases.py", libraries, *names) == names


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [function.__name__ for function in placement_cases.OUT_OF_MEMORY])
def test_out_of_memory_raises_and_the_pipeline_stays_usable(name: str, libraries: tuple[Path, Path]) -> None:
    assert run("placement_cases.py", libraries, name, memory=placement_cases.MEMORY) == [name]

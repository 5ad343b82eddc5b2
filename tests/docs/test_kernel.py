"""The guide of fused kernels shows the kernel and the machine code of the layer in its example."""

from __future__ import annotations

import pytest
import triton

from tests.docs.worked_example import SECTION, SHOWN, kernel_text, launch_of_the_layer, memory_accesses


def test_the_guide_shows_the_kernel_that_computes_its_layer() -> None:
    launch = launch_of_the_layer()
    assert kernel_text(launch) == SHOWN[0]
    assert f"`{launch.name}`" in SECTION


@pytest.mark.skipif(triton.__version__ != "3.8.0", reason="another Triton compiles otherwise")
def test_the_guide_shows_the_memory_accesses_of_the_cubin() -> None:
    assert memory_accesses(launch_of_the_layer()) == SHOWN[1]

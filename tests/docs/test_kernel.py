"""The guide of fused kernels shows the nodes, the kernel and the machine code of the layer in its example."""

from __future__ import annotations

import pytest
import triton

from tests.docs.worked_example import SECTION, SHOWN, kernel_text, memory_accesses, nodes_and_launch


def test_the_guide_shows_the_nodes_of_its_layer_and_the_kernel_that_replaces_them() -> None:
    nodes, launch = nodes_and_launch()
    assert [nodes, kernel_text(launch)] == SHOWN[:2]
    assert f"`{launch.name}`" in SECTION


@pytest.mark.skipif(triton.__version__ != "3.8.0", reason="another Triton compiles otherwise")
def test_the_guide_shows_the_memory_accesses_of_the_cubin() -> None:
    _, launch = nodes_and_launch()
    assert memory_accesses(launch) == SHOWN[2]

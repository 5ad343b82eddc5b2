"""What processes of a mesh send, for a model whose bytes follow from its sizes; and the table of the page."""

from __future__ import annotations

import re

import pytest

from tests.docs.markdown import ROOT
from tools import meshes

BLOCKS, WIDTH, HEADS, MLP, LENGTH = 2, 64, 4, 96, 16
TENSOR = LENGTH * WIDTH * 2  # bytes of an activation


@pytest.mark.parametrize(
    ("plan", "forward", "backward"), [("plan", 2, 5), ("joined", 2, 2), ("sequence", 4, 4)]
)
@pytest.mark.parametrize("size", [2, 4])
def test_collectives_of_blocks(plan: str, forward: int, backward: int, size: int) -> None:
    found = meshes.sent(size, plan, BLOCKS, WIDTH, HEADS, MLP, LENGTH)
    counts = [forward * BLOCKS, backward * BLOCKS, (forward + backward) * BLOCKS - 1]
    assert [*found.collectives.values()] == counts
    share = (size - 1) / size * (1 if plan == "sequence" else 2)
    assert found.saved == share * (forward + backward) * BLOCKS * TENSOR
    assert found.recomputed == share * (counts[0] + counts[2]) * TENSOR
    positions = 2 * LENGTH * WIDTH // HEADS * 2
    assert found.boundary == 2 * TENSOR // (size if plan == "sequence" else 1) + positions
    norms = 2 * WIDTH
    assert found.gradients == 2 * BLOCKS * ((4 * WIDTH**2 + 3 * WIDTH * MLP) // size + norms)


def test_the_table_of_the_page_is_that_of_the_command() -> None:
    def rows(name: str) -> list[list[str]]:
        lines = re.findall(r"^\|( *\d.*)\|$", (ROOT / name).read_text(), re.MULTILINE)
        return [[cell.strip() for cell in line.split("|")] for line in lines]

    found = rows("bench/results/meshes.md")
    assert rows("docs/guide/choosing_a_mesh.md") == found
    of_meshes = [row[: len(mesh)] for row, mesh in zip(found, (*meshes.MESHES, *meshes.SHARDED), strict=True)]
    assert of_meshes == [[str(x) for x in mesh] for mesh in (*meshes.MESHES, *meshes.SHARDED)]
    assert found[-1] == list(map(str, meshes.row_of_shards(*meshes.SHARDED[-1])))
    assert found[1] == list(map(str, meshes.row(*meshes.MESHES[1])))

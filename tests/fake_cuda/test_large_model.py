"""A model that is larger than the host's memory: built on the meta device, loaded into fake GPUs, trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.fake_cuda import large_model
from tests.fake_cuda.build import can_build
from tests.fake_cuda.process import run

pytestmark = [
    pytest.mark.skipif(
        not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
    ),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.xdist_group("large model"),
]
# The width of the layers, and the MiB of private memory that the process may allocate after its imports. The
# parameters take 256 MiB.
WIDTH, LIMIT = 2048, 160
# Here, they take 1296 MiB, and are larger than the limit and the imports together, which are about 870 MiB.
LARGE_WIDTH, LARGE_LIMIT = 4608, 280


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def program(libraries: tuple[Path, Path], way: str, path: Path, width: int, limit: int) -> list[str]:
    save_file(large_model.layers(width).state_dict(), path)
    return run("large_model.py", libraries, way, str(path), str(width), str(limit), shared=1)


def test_it_trains_as_the_plain_loop(libraries: tuple[Path, Path], path: Path) -> None:
    _, *found = program(libraries, "pipeline", path, WIDTH, LIMIT)
    assert path.stat().st_size > LIMIT * large_model.MIB
    assert found == large_model.train_plain(path, WIDTH)


@pytest.mark.extended
def test_it_may_be_larger_than_all_memory_of_the_process(libraries: tuple[Path, Path], path: Path) -> None:
    limit, *found = program(libraries, "pipeline", path, LARGE_WIDTH, LARGE_LIMIT)
    assert path.stat().st_size > int(limit)
    assert found == large_model.train_plain(path, LARGE_WIDTH)


@pytest.mark.extended
def test_layers_on_the_cpu_do_not_fit(libraries: tuple[Path, Path], path: Path) -> None:
    """So the limit is effective."""
    _, *found = program(libraries, "plain", path, WIDTH, LIMIT)
    assert "can't allocate memory" in found[0]

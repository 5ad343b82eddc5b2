"""Runs the comparisons in numerics/ with kernels: in Triton's interpreter, and on a GPU.

Triton selects the interpreter when it is imported, so these runs need separate processes; in pytest's own
process the comparisons test the reference implementations. `make test` runs a sample in the interpreter,
`make soak` the rest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.sampling import seed

ROOT = Path(__file__).parents[3]
FAMILIES = [path.stem for path in sorted((Path(__file__).parent / "numerics").glob("test_*.py"))]

every_family = pytest.mark.parametrize("family", FAMILIES)


def test_a_sample_of_the_comparisons_passes_in_the_interpreter() -> None:
    """All families share a process, because its start takes as long as the sample of one family."""
    run_families(FAMILIES, {"TRITON_INTERPRET": "1", "GPIPE_FAST_KERNELS_SHARE": "sample"})


@pytest.mark.extended
@every_family
def test_the_remaining_comparisons_pass_in_the_interpreter(family: str) -> None:
    # A small family may be in the sample as a whole.
    allowed = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    run_families([family], {"TRITON_INTERPRET": "1", "GPIPE_FAST_KERNELS_SHARE": "rest"}, allowed)


@pytest.mark.cuda
@every_family
def test_all_comparisons_pass_on_a_gpu(family: str) -> None:
    run_families([family], {"TRITON_INTERPRET": "0", "GPIPE_FAST_KERNELS_ON": "cuda"})


def run_families(
    families: Sequence[str], variables: dict[str, str], allowed: Sequence[int] = (pytest.ExitCode.OK,)
) -> None:
    """Runs the comparisons of some families in a separate process, which exits with one of some codes."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/unit/kernels/numerics/{family}.py" for family in families]
    own = {"GPIPE_FAST_SEED": str(seed()), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment = os.environ | own | variables
    # With these variables of a pytest-xdist worker, the child would consider itself a worker.
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode in allowed, f"GPIPE_FAST_SEED={seed()}\n{done.stdout[-8000:]}{done.stderr[-2000:]}"

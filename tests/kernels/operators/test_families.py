"""Every family of kernels where it can run: in Triton's interpreter, on a GPU; as references on the CPU.

Each in a process of its own, since the interpreter is chosen when Triton is imported; as many at once as
there are processors.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FAMILIES = [path.stem for path in sorted((ROOT / "tests" / "kernels").glob("test_*.py"))]
INTERPRETER, GPU, REFERENCES = "interpreter", "GPU", "references"

Done = subprocess.CompletedProcess[str]
Runs = dict[tuple[str, str], "Future[Done]"]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """What the module's tests wait for, by where it runs and family."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found: Runs = {}
        for item in request.session.items:
            if item.path == Path(__file__) and not item.get_closest_marker("skip"):
                where, family = item.callspec.params.values()  # type: ignore[attr-defined]
                found[where, family] = pool.submit(run, where, family)
        yield found
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    ("where", "family"),
    [
        (REFERENCES, "all"),
        *((INTERPRETER, family) for family in FAMILIES),
        *(pytest.param(GPU, family, marks=pytest.mark.cuda) for family in FAMILIES),
    ],
)
def test_computes_what_pytorch_does(where: str, family: str, runs: Runs) -> None:
    done = runs[where, family].result()
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def run(where: str, family: str) -> Done:
    """The tests of a family, or of all of them."""
    files = FAMILIES if where == REFERENCES else [family]
    device = "cuda" if where == GPU else "cpu"
    variables = {
        "TRITON_INTERPRET": "1" if where == INTERPRETER else "0",
        "GPIPE_FAST_KERNELS_ON": device,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/kernels/{name}.py" for name in files]
    environment = os.environ | variables
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)

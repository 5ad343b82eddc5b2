"""Every family of kernels in Triton's interpreter, and their references, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

FAMILIES = sorted((Path(__file__).parent / "kernels").glob("test_*.py"))
REFERENCES = "references"

Runs = dict[str, "Future[subprocess.CompletedProcess[str]]"]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """All that the module's tests wait for, as many at once as there are processors."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found: Runs = {}
        for item in request.session.items:
            if item.parent is not None and item.parent.name.endswith(Path(__file__).name):
                name = item.callspec.params["name"]  # type: ignore[attr-defined]
                found[name] = pool.submit(run, name)
        yield found
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", [REFERENCES, *(path.stem for path in FAMILIES)])
def test_computes_what_pytorch_does(name: str, runs: Runs) -> None:
    done = runs[name].result()
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def run(name: str) -> subprocess.CompletedProcess[str]:
    """A family in the interpreter; or the references, in bf16 too, of tests collected as on a GPU."""
    families: Sequence[Path] = [path for path in FAMILIES if name in (path.stem, REFERENCES)]
    variables = {"TRITON_INTERPRET": "1"}
    if name == REFERENCES:
        variables = {"TRITON_INTERPRET": "0", "GPIPE_FAST_KERNELS_ON": "cpu"}
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, **variables}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, families)]
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=900)

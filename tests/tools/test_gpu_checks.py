"""The small cases that `make gpu` runs, and a row of a benchmark: on the fake CUDA runtime."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import measure
from tests.fake_cuda.build import can_build

# Runs at the start of every Python process; loads the fake operators in processes that compute. Triton's
# interpreter runs their kernels.
SITECUSTOMIZE = """
import os, sys
if "--here" in sys.orig_argv or "built_with_cuda" in sys.orig_argv[-1]:
    os.environ["TRITON_INTERPRET"] = "1"
    import tests.fake_cuda.plugin
    from tests.fake_cuda.fusion_cases import register_kernels
    register_kernels()
"""
# `make gpu` with few cases and one row of a benchmark.
FEW_CASES = """
import sys
from tools.on_gpu import phases as on_gpu
from tools.on_gpu.phases import Phase
checks = [sys.executable, "-m", "tools.on_gpu.checks"]
commands = {
    "models": [*checks, "models", "mlp, fused kernels", "gpt"],
    "memory": [*checks, "memory", "mlp, never", "mlp, a limit, fused kernels"],
}
steps = [sys.executable, "-m", "bench.gpu.cuda", "tiny-never"]
on_gpu.phases = lambda names: [
    Phase("correct", commands, on_gpu.SECONDS / 2),
    Phase("steps", {"steps": steps}, on_gpu.SECONDS / 4, files=["fake-gpu-*.md"]),
]
on_gpu.main()
"""


@pytest.mark.extended
@pytest.mark.skipif(not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers")
def test_cases_and_a_benchmark_run_on_the_fake_runtime(libraries: tuple[Path, Path], tmp_path: Path) -> None:
    runtime, operators = libraries
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    variables = {
        "LD_PRELOAD": str(runtime),
        "FAKE_CUDA_LOG": os.devnull,
        "FAKE_CUDA_OPERATORS": str(operators),
        "GPIPE_FAST_CACHE": str(measure.ROOT / "build" / "tests" / "cubins"),
        "GPIPE_FAST_RESULTS": str(tmp_path),
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{measure.ROOT}",
    }
    command = [sys.executable, "-W", "ignore", "-c", FEW_CASES]
    process = subprocess.run(
        command, env=os.environ | variables, cwd=measure.ROOT, capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, process.stdout + process.stderr[-3000:]
    machine = (tmp_path / "gpu-machine.txt").read_text()
    assert "Fake GPU" in machine
    assert "extension: existing build used; it runs on the device" in machine
    assert (tmp_path / "gpu-memory.md").read_text().count("% of the predicted") == 2
    fused, row = (tmp_path / "gpu-models.md").read_text().splitlines()[-2:]
    assert row.split("|")[2].strip() == "equal", row
    assert "3 mini-batches replayed" in row
    assert re.search(r"error \S+ against float64, the plain loop's is \S+; [1-9]\d* replacements ", fused), (
        fused
    )
    assert "3 mini-batches replayed" in fused
    (file,) = tmp_path.glob("fake-gpu-*.md")
    text = file.read_text()
    assert "| gpipe_fast, captured" in text
    assert text.count("| addmm ") == 2

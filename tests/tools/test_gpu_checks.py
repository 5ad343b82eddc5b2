"""The small cases that `make gpu` runs first: on the fake CUDA runtime, and with a simulated clock."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import measure
from tests.fake_cuda.build import can_build
from tools.on_gpu import machine as gpu_machine
from tools.on_gpu.checks import Results


def test_every_row_is_written_immediately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    results = Results("plans")
    results.keep("one", [True, "equal", "forward"], 1.5)
    assert "| one    | equal" in (tmp_path / "gpu-plans.md").read_text()
    results.keep("another", "FAILED: why", 0.0)
    text = (tmp_path / "gpu-plans.md").read_text()
    assert "| one " in text
    assert "FAILED: why" in text


def test_gpu_machine_prints_every_fact_even_if_one_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> str:
        raise OSError("not today")

    monkeypatch.setitem(gpu_machine.FACTS, "driver", fail)
    gpu_machine.main()
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == list(gpu_machine.FACTS)
    assert lines["driver"] == "FAILED: OSError: not today"
    assert "torch 2." in lines["packages"]


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
# `make gpu` with only the first phases and few cases.
FEW_CASES = """
import sys
from tools.on_gpu import phases as on_gpu
from tools.on_gpu.phases import Phase
checks = [sys.executable, "-m", "tools.on_gpu.checks"]
plans = ["two shapes in flight, last goes back first"]
on_gpu.phases = lambda: [
    Phase("models", {"models": [*checks, "models", "mlp, fused kernels", "gpt"]}, 200),
    Phase("plans", {"plans": [*checks, "plans", *plans]}, 200),
]
on_gpu.main()
"""


@pytest.mark.extended
@pytest.mark.skipif(not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers")
def test_the_first_phases_run_on_the_fake_cuda_runtime(libraries: tuple[Path, Path], tmp_path: Path) -> None:
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
        command, env=os.environ | variables, cwd=measure.ROOT, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stdout + process.stderr[-3000:]
    machine = (tmp_path / "gpu-machine.txt").read_text()
    assert "Fake GPU" in machine
    assert "extension: existing build used; it runs on the device" in machine
    for phase, replays in (("models", 3), ("plans", 5)):
        row = (tmp_path / f"gpu-{phase}.md").read_text().splitlines()[-1]
        assert row.split("|")[2].strip() == "equal", row
        assert f"{replays} mini-batches replayed" in row
    fused = (tmp_path / "gpu-models.md").read_text().splitlines()[-2]
    assert re.search(r"error \S+ against float64, the plain loop's is \S+; [1-9]\d* replacements ", fused), (
        fused
    )
    assert "3 mini-batches replayed" in fused

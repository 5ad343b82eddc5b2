"""Stages in several processes on real GPUs equal the pipeline in one process bit for bit.

Those that need several GPUs have never run. tests/fake_cuda/test_mesh.py runs the same code on the fake CUDA
runtime, with a stand-in for NCCL.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.distributed import cases
from tests.distributed.launch import needs_gloo, run_ranks

# cuBLAS reads this before the first matrix product of a process.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = [pytest.mark.cuda, needs_gloo]

MODELS = ["batch norm", "gpt", "tuples", "dropout", "ties", "skips"]
SCHEDULES = ["gpipe", "1f1b", "zb-h1"]


def test_two_processes_on_one_gpu_by_gloo() -> None:
    found = run_ranks(2, cases.same_bits_on_gpus, ["cuda:0"] * 2, MODELS, SCHEDULES)
    assert found == [len(MODELS) * len(SCHEDULES)] * 2


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_gpu_for_each_process(num_ranks: int, backend: str) -> None:
    """Several GPUs are needed."""
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    devices = [f"cuda:{rank}" for rank in range(num_ranks)]
    found = run_ranks(num_ranks, cases.same_bits_on_gpus, devices, MODELS, SCHEDULES, backend=backend)
    assert found == [len(MODELS) * len(SCHEDULES)] * num_ranks

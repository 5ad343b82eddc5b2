"""Generated kernels: their source, their names, and their machine code from another process."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_fast.fuse import cubins
from gpipe_fast.fuse.compile_helper import job_of
from gpipe_fast.fuse.cubin import FOLDER_VARIABLE, MODULE, Cubin, generated_from, kernel_of
from gpipe_fast.fuse.cubins import sources_of
from gpipe_fast.fuse.fuse import fuse
from gpipe_fast.fuse.regions.kernel import block_of
from gpipe_fast.fuse.regions.source import source_of
from gpipe_fast.lower.launch import KernelSource
from tests.unit.fuse.graphs import Function, regions_in, stage_of

pytestmark = pytest.mark.usefixtures("one_thread")

HOPPER = (9, 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns an empty cache, which one other process fills."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cubins"))
    monkeypatch.setenv(cubins.WORKERS_VARIABLE, "1")
    monkeypatch.setattr(cubins, "compile_here", None)
    cubins.forget()
    yield tmp_path / "cubins"
    cubins.forget()


def launch_of_region() -> Any:
    _, forward, _ = stage_of([Function(lambda x: x.exp().sin())], torch.randn(64, 64))
    (launch,) = fuse(forward).launches()
    return launch


def test_a_launch_has_the_source_of_its_kernel() -> None:
    launch = launch_of_region()
    function = launch.kernel.fn
    text = generated_from(function)
    assert text is not None
    assert launch.name == f"generated.{function.__name__}"
    assert function.__module__ == MODULE
    assert function.__name__.startswith("exp_sin_")
    assert inspect.getsource(function) in text
    assert "# exp\n" in text
    assert "tl.sin(" in text
    assert generated_from(test_a_launch_has_the_source_of_its_kernel) is None


def test_equal_regions_share_a_kernel() -> None:
    assert launch_of_region().kernel is launch_of_region().kernel
    assert launch_of_region().specialization == launch_of_region().specialization


def test_a_name_tells_operators_and_source() -> None:
    first, second = (
        regions_in(lambda x, n=n: (x * n).exp().sin(), (64, 64), device="cpu")[0] for n in (2.0, 3.0)
    )
    names = [source_of(r, block_of(r, torch.device("cpu"))[0]).name for r in (first, second)]
    assert names[0] != names[1], "the number is part of the source"
    assert {name.rpartition("_")[0] for name in names} == {"exp_sin"}


def test_a_job_has_the_text_of_a_kernel() -> None:
    launch = launch_of_region()
    job = job_of(sources_of(launch)[0])
    assert job is not None
    assert (job.module, job.text) == (MODULE, generated_from(launch.kernel.fn))
    assert job.find() == sources_of(launch)[0]


def test_another_text_is_another_kernel() -> None:
    launch = launch_of_region()
    job = job_of(sources_of(launch)[0])
    assert job is not None
    assert job.text is not None
    changed = job.text.replace("tl.sin(", "tl.cos(")
    other = kernel_of(job.qualname, changed)
    assert other is not launch.kernel
    assert replace(job, text=changed).find() is None, "the hash of its source differs"


def source(number: int) -> KernelSource:
    text = f"""
import triton
import triton.language as tl

@triton.jit
def kernel(p_x, p_y, size, BLOCK: tl.constexpr):
    tl.store(p_y, tl.load(p_x) + {number})
"""
    signature = (("p_x", "*fp32"), ("p_y", "*fp32"), ("size", "i32"))
    return KernelSource(kernel_of("kernel", text), signature, (("BLOCK", 64),), ("p_x", "p_y"), 4, 1)


@pytest.mark.extended
def test_kernels_with_another_text_have_own_cubins(folder: Path) -> None:
    first, second, again = cubins.cubins([source(1), source(20), source(1)], HOPPER)
    assert isinstance(first, Cubin)
    assert isinstance(second, Cubin)
    assert first.name == second.name == "kernel"
    assert first.image != second.image
    assert again is first
    assert len(list(folder.glob("*/*.cubin"))) == 2
    texts = {path.read_text() for path in folder.glob("*/kernel.py")}
    assert texts == {generated_from(source(each).kernel.fn) for each in (1, 20)}


def test_kernels_of_regions_are_compiled_in_another_process(folder: Path) -> None:
    """They call functions of gpipe_fast's own kernels, which the other process imports."""
    _, forward, _ = stage_of([nn.GELU(), nn.LayerNorm(8)], torch.randn(4, 8))
    (launch,) = fuse(forward).launches()
    found = cubins.cubins(sources_of(launch), HOPPER)
    for cubin in found:
        assert isinstance(cubin, Cubin)
        assert f"generated.{cubin.name}" == launch.name
    assert len(list(folder.glob("*/*.cubin"))) == len({*sources_of(launch)}) == 2

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
from tests.unit.fuse.graphs import Function, stage_of

pytestmark = pytest.mark.usefixtures("one_thread")

HOPPER = (9, 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns an empty cache, which one other process fills."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cubins"))
    monkeypatch.setenv(cubins.WORKERS_VARIABLE, "1")
    monkeypatch.setattr(cubins, "compile_here", None)
    cubins._memory.clear()
    yield tmp_path / "cubins"
    cubins._memory.clear()


def launch_of_region(factor: float = 1.0) -> Any:
    _, forward, _ = stage_of([Function(lambda x: (x * factor).exp().sin())], torch.randn(64, 64))
    (launch,) = fuse(forward).launches()
    return launch


def test_a_kernel_is_named_after_its_operators_and_its_source() -> None:
    launch, equal, other = launch_of_region(2.0), launch_of_region(2.0), launch_of_region(3.0)
    function = launch.kernel.fn
    text = generated_from(function)
    assert text is not None
    assert launch.name == f"generated.{function.__name__}"
    assert function.__module__ == MODULE
    assert inspect.getsource(function) in text
    assert equal.kernel is launch.kernel
    assert equal.specialization == launch.specialization
    names = launch.name, other.name
    assert names[0] != names[1], "the number is part of the source"
    assert {name.rpartition("_")[0] for name in names} == {"generated.exp_sin"}


def test_a_job_has_the_text_of_a_kernel() -> None:
    launch = launch_of_region()
    job = job_of(sources_of(launch)[0])
    assert job is not None
    assert job.text is not None
    assert (job.module, job.text) == (MODULE, generated_from(launch.kernel.fn))
    assert job.find() == sources_of(launch)[0]
    changed = job.text.replace("tl.sin(", "tl.cos(")
    assert kernel_of(job.qualname, changed) is not launch.kernel
    assert replace(job, text=changed).find() is None, "the hash of its source differs"


def test_kernels_of_regions_are_compiled_in_another_process(folder: Path) -> None:
    """They call functions of gpipe_fast's own kernels, which the other process imports."""
    _, forward, _ = stage_of([nn.GELU(), nn.LayerNorm(8)], torch.randn(4, 8))
    (launch,) = fuse(forward).launches()
    found = cubins.cubins(sources_of(launch), HOPPER)
    for cubin in found:
        assert isinstance(cubin, Cubin)
        assert f"generated.{cubin.name}" == launch.name
    assert len(list(folder.glob("*/*.cubin"))) == len({*sources_of(launch)}) == 2

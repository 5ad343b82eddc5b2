"""Fake tensors with the strides and dtypes that real kernels return."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.trace.fake import RealLayouts
from tests.sampling import seed

IMAGES = torch.randn(2, 4, 5, 5)
LAST = IMAGES.to(memory_format=torch.channels_last)
ROWS, ENDS = torch.randn(6, 8), torch.tensor([2, 2, 6], dtype=torch.int32)
OPERATORS: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "group norm": (lambda x: F.group_norm(x, 2), LAST),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), LAST),
    "padding": (lambda x: F.pad(x, (1, 1)), LAST),
    "gated unit": (lambda x: F.glu(x, 1), LAST),
    "permuted": (lambda x: F.pad(x, (0, 2)), torch.randn(3, 4, 5).permute(2, 0, 1)),
    "sum": (lambda x: x.sum(1), LAST),
    "contiguous": (lambda x: F.group_norm(x, 2), IMAGES),
    "matrix": (lambda x: F.logsigmoid(x), torch.randn(4, 3).t()),
    "backward of a matrix": (
        lambda x: torch.ops.aten._log_softmax_backward_data(x, x.contiguous(), 1, x.dtype),
        torch.randn(4, 3).t(),
    ),
    "product by groups": (lambda x: torch._grouped_mm(x, torch.randn(3, 8, 4), ENDS), ROWS),
    "padded product by groups": (lambda x: torch._grouped_mm(x, torch.randn(3, 5, 8).mT, ENDS), ROWS),
    "products of groups": (lambda x: torch._grouped_mm(x.t(), torch.randn(6, 4), ENDS), ROWS),
    "view": (lambda x: x.view(4, 1, 16, 4), torch.randn(4, 64, 1, 1).transpose(1, 2)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_strides_are_those_of_the_real_kernel(name: str) -> None:
    function, x = OPERATORS[name]
    mode = RealLayouts()
    fake = mode.from_tensor(x)
    with mode:
        found = function(fake)
    real = function(x)
    assert (found.shape, found.stride(), found.dtype) == (real.shape, real.stride(), real.dtype)


def test_a_view_with_real_strides_aliases_its_tensor() -> None:
    mode = RealLayouts()
    fake = mode.from_tensor(torch.randn(4, 65, 1, 1)[:, 1:].transpose(1, 2))
    with mode:
        view = fake.view(4, 1, 16, 4)
    assert view.untyped_storage()._cdata == fake.untyped_storage()._cdata
    assert (view.storage_offset(), view.stride()) == (1, (65, 64, 4, 1))


@pytest.mark.soak
def test_layouts_of_all_operators_of_pytorch() -> None:
    command = [sys.executable, "-m", "tests.unit.trace.operator_layouts", "--seed", seed()]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout

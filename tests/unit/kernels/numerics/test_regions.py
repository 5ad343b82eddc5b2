"""Generated kernels in stages: parts of models, each fused and compared with PyTorch's operators."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.numerics.comparison import needs_kernels
from tests.unit.kernels.numerics.fused_graphs import compare, trace
from tests.unit.kernels.numerics.spelled_models import PARTS

pytestmark = needs_kernels

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@every_dtype
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_models_are_fused(name: str, dtype: torch.dtype) -> None:
    part = PARTS[name]
    inputs = part.inputs(dtype)
    compared = trace(part.function, inputs)
    assert sorted(compared.left()) == sorted(part.left)
    assert compared.num_launches() <= part.launches
    compare(compared, inputs)


@every_dtype
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_models_are_recomputed(name: str, dtype: torch.dtype) -> None:
    inputs = PARTS[name].inputs(dtype)
    compared = trace(PARTS[name].function, inputs, recompute=True)
    # Without the forward, a kernel would save few of the bytes of DropPath.
    others = {"gpipe_fast.keyed_bernoulli.default", "aten.div.Tensor"} if name == "DropPath" else set[str]()
    assert set(compared.left()) <= {*PARTS[name].left, *others}
    compare(compared, inputs)

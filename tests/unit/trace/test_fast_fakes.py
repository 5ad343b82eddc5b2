"""Fake results that are computed from shapes alone equal those of PyTorch's fake and real kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from gpipe_fast.trace.fake import RealLayouts
from gpipe_fast.trace.fast_fakes import _RULES, fast_fake

aten = torch.ops.aten
SHAPES = [(4, 6), (2, 3, 5), (2, 3, 4, 5), (2, 4, 3, 2, 3)]


def dense(shape: Sequence[int]) -> Tensor:
    return torch.randn(shape)


def sliced(shape: Sequence[int]) -> Tensor:
    """Returns a part of a larger tensor, as the gradient of a concatenated tensor is."""
    whole = torch.randn([shape[0], 2 * shape[1], *shape[2:]])
    return whole[:, shape[1] :]


def batch_norm(x: Tensor) -> tuple[Any, ...]:
    channels = [torch.rand(x.shape[1]) for _ in range(4)]
    return (x, *channels, True, 0.1, 1e-5)


def batch_norm_backward(x: Tensor, mask: tuple[bool, ...] = (True, True, True)) -> tuple[Any, ...]:
    channels = [torch.rand(x.shape[1]) for _ in range(5)]
    return (torch.randn(x.shape), x, *channels, True, 1e-5, list(mask))


CASES: list[tuple[Any, Callable[[Sequence[int]], tuple[Any, ...]]]] = [
    (aten.relu.default, lambda shape: (dense(shape),)),
    (aten.gelu.default, lambda shape: (dense(shape),)),
    (aten.silu.default, lambda shape: (dense(shape),)),
    (aten.add.Tensor, lambda shape: (dense(shape), dense(shape))),
    (aten.add.Tensor, lambda shape: (sliced(shape), dense(shape))),
    (aten.mul.Tensor, lambda shape: (dense(shape), sliced(shape))),
    (aten.mul.Tensor, lambda shape: (sliced(shape), sliced(shape))),
    (aten.threshold_backward.default, lambda shape: (sliced(shape), dense(shape), 0)),
    (aten.slice.Tensor, lambda shape: (dense(shape), 1, 1, 2)),
    (aten.slice.Tensor, lambda shape: (sliced(shape), 0, 0, 1000)),
    (aten._native_batch_norm_legit_functional.default, lambda shape: batch_norm(dense(shape))),
    (aten.native_batch_norm_backward.default, lambda shape: batch_norm_backward(dense(shape))),
]


def metadata(results: Any) -> list[Any]:
    results = results if isinstance(results, (list, tuple)) else [results]
    return [(tuple(r.shape), r.stride(), r.storage_offset(), r.dtype, r.device) for r in results]


def fakes(mode: FakeTensorMode, args: Any) -> Any:
    return tree_map_only(Tensor, lambda t: mode.from_tensor(t, static_shapes=True), args)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}{i}")
def test_results_equal_those_of_pytorchs_kernels(index: int, shape: Sequence[int]) -> None:
    operator, arguments = CASES[index]
    if "batch_norm" in str(operator) and len(shape) < 3:
        return
    args = arguments(shape)
    mode, plain = RealLayouts(), FakeTensorMode()
    fast = fast_fake(mode, operator, fakes(mode, args), {})
    assert fast is not None
    with plain:
        slow = operator(*fakes(plain, args))
    real = operator(*args)
    assert metadata(fast) == metadata(slow) == metadata(real)


def test_every_rule_has_a_case() -> None:
    assert {operator for operator, _ in CASES} == set(_RULES)


def test_a_slice_is_a_view() -> None:
    mode = RealLayouts()
    x = mode.from_tensor(torch.randn(4, 6), static_shapes=True)
    found = fast_fake(mode, aten.slice.Tensor, (x, 1, 2, 4), {})
    assert found.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert found.storage_offset() == 2


@pytest.mark.parametrize(
    "args",
    [
        (torch.randn(4, 6), torch.randn(6)),
        (torch.randn(4, 6), 2.0),
        (torch.randn(4, 6), torch.randn(4, 6, dtype=torch.float64)),
        (torch.randn(4, 6), torch.randn(6, 4).t()),
        (torch.randn(4, 1), torch.randn(4, 1)),
        (torch.randn(1, 6).expand(4, 6), torch.randn(4, 6)),
        (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(2, 3, 4, 5)),
    ],
    ids=["broadcast", "number", "dtypes", "transposed", "size one", "expanded", "channels_last"],
)
def test_other_arguments_are_left_to_pytorch(args: Any) -> None:
    mode = RealLayouts()
    assert fast_fake(mode, aten.add.Tensor, fakes(mode, args), {}) is None


def test_other_keywords_and_operators_are_left_to_pytorch() -> None:
    mode = RealLayouts()
    x = fakes(mode, torch.randn(4, 6))
    assert fast_fake(mode, aten.add.Tensor, (x, x), {"alpha": 2}) is None
    assert fast_fake(mode, aten.sub.Tensor, (x, x), {}) is None
    image = dense((2, 3, 4, 5))
    masked = fakes(mode, batch_norm_backward(image, (False, True, True)))
    assert fast_fake(mode, aten.native_batch_norm_backward.default, masked, {}) is None

"""Gradients of many tensors outside the interpreter: as operators of PyTorch's, and on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpipe_fast.kernels import accumulate_, accumulate_and_check_, unscale_

SIZES = (1, 63, 0, 100)
ops = torch.ops.gpipe_fast


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(3, size).to(dtype) for size in SIZES]


def test_opcheck() -> None:
    inverse, found = torch.tensor([0.5]), torch.zeros(1)
    checked = torch.library.opcheck
    checked(ops.multi_tensor_accumulate_.default, (tensors(), tensors(torch.bfloat16)))
    checked(ops.multi_tensor_unscale_.default, (tensors(torch.float16), inverse, found))
    arguments = (tensors(torch.bfloat16), tensors(), inverse, found)
    checked(ops.multi_tensor_accumulate_and_check_.default, arguments)


def test_in_the_place_of_a_scaler_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(bad: bool) -> tuple[Tensor, float]:
        weight = torch.ones(5, requires_grad=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        optimizer = torch.optim.SGD([weight], lr=0.5)
        scaler.scale((weight * torch.arange(5.0) / (0.0 if bad else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return weight.detach(), scaler.get_scale()

    theirs = [run(False), run(True)]
    called = []

    def unscale(gradients: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
        called.append(len(gradients))
        assert unscale_(gradients, inverse_scale, found_inf) is found_inf

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", unscale)
    ours = [run(False), run(True)]
    assert called == [1, 1]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_compiled() -> None:
    def function(a: list[Tensor], g: list[Tensor], inverse: Tensor) -> tuple[Tensor, Tensor]:
        g = [x * 2 for x in g]
        accumulate_(a, g)
        found = unscale_(g, inverse)
        return accumulate_and_check_(a, g, inverse, found), a[0] + 1

    g, inverse = tensors(torch.bfloat16), torch.tensor([0.5])
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for bad in (1.0, float("inf")):
        g[1][0, 0] = bad
        a = tensors()
        own = [x.clone() for x in a]
        torch.testing.assert_close(compiled(own, g, inverse), function(a, g, inverse), rtol=0, atol=0)
        torch.testing.assert_close(own, a, rtol=0, atol=0)


def test_what_autograd_saved_is_known_to_have_changed() -> None:
    weight, a = torch.ones(3, requires_grad=True), torch.ones(3)
    product = weight * a
    accumulate_([a], [torch.ones(3)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_bad_input() -> None:
    a, inverse = torch.zeros(3), torch.ones(1)
    needing = torch.zeros(3, requires_grad=True)
    for accumulators, gradients, words in [
        ([a], [], "1 accumulators, but 0 gradients"),
        ([a, a], [a, a[:2]], r"shapes differ at 1: \[3\] and \[2\]"),
        ([a], [a.int()], "floating point, got torch.float32 and torch.int32 at 0"),
        ([a, a], [a, a.to("meta")], "devices differ at 1: cpu and meta, not cpu"),
        ([needing], [a], "a tensor at 0 requires a gradient"),
        ([a], [needing], "a tensor at 0 requires a gradient"),
    ]:
        with pytest.raises(ValueError, match=words):
            accumulate_(accumulators, gradients)
        with pytest.raises(ValueError, match=words):
            accumulate_and_check_(accumulators, gradients, inverse)
    for scalar in (torch.ones(2), torch.ones(1).double(), torch.ones(1, device="meta")):
        for arguments in ((scalar, torch.zeros(1)), (inverse, scalar)):
            with pytest.raises(ValueError, match=r"devices differ|must be one element of fp32"):
                unscale_([a], *arguments)
            with pytest.raises(ValueError, match=r"devices differ|must be one element of fp32"):
                accumulate_and_check_([a], [a], *arguments)
    with pytest.raises(ValueError, match="a tensor at 0 requires a gradient"):
        unscale_([needing], inverse)
    with torch.no_grad():
        accumulate_([needing], [a])

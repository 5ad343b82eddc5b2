"""Operations on the gradients of many tensors, on the CPU: PyTorch operators, errors and torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpipe_fast.kernels import accumulate_, accumulate_and_check_, unscale_

SIZES = (1, 63, 0, 100)
ops = torch.ops.gpipe_fast


def random_tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(3, size).to(dtype) for size in SIZES]


def test_multi_tensor_operators_pass_opcheck() -> None:
    inverse, found = torch.tensor([0.5]), torch.zeros(1)
    opcheck = torch.library.opcheck
    opcheck(ops.multi_tensor_accumulate_.default, (random_tensors(), random_tensors(torch.bfloat16)))
    opcheck(ops.multi_tensor_unscale_.default, (random_tensors(torch.float16), inverse, found))
    arguments = (random_tensors(torch.bfloat16), random_tensors(), inverse, found)
    opcheck(ops.multi_tensor_accumulate_and_check_.default, arguments)


def test_unscale_in_a_grad_scaler_equals_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
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

    def counted_unscale(gradients: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
        called.append(len(gradients))
        assert unscale_(gradients, inverse_scale, found_inf) is found_inf

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", counted_unscale)
    ours = [run(False), run(True)]
    assert called == [1, 1]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_compiled_multi_tensor_functions_equal_the_eager_ones() -> None:
    def function(a: list[Tensor], g: list[Tensor], inverse: Tensor) -> tuple[Tensor, Tensor]:
        g = [x * 2 for x in g]
        accumulate_(a, g)
        found = unscale_(g, inverse)
        return accumulate_and_check_(a, g, inverse, found), a[0] + 1

    g, inverse = random_tensors(torch.bfloat16), torch.tensor([0.5])
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for bad in (1.0, float("inf")):
        g[1][0, 0] = bad
        a = random_tensors()
        own = [x.clone() for x in a]
        torch.testing.assert_close(compiled(own, g, inverse), function(a, g, inverse), rtol=0, atol=0)
        torch.testing.assert_close(own, a, rtol=0, atol=0)


def test_accumulate_into_a_tensor_that_autograd_saved_is_an_error_in_backward() -> None:
    weight, a = torch.ones(3, requires_grad=True), torch.ones(3)
    product = weight * a
    accumulate_([a], [torch.ones(3)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_multi_tensor_functions_reject_invalid_arguments() -> None:
    a, inverse = torch.zeros(3), torch.ones(1)
    leaf = torch.zeros(3, requires_grad=True)
    for accumulators, gradients, message in [
        ([a], [], "got 1 accumulators and 0 gradients"),
        ([a, a], [a, a[:2]], r"gradient 1 must have its accumulator's shape \[3\], got \[2\]"),
        ([a], [a.int()], "gradient 0 must be floating-point, got torch.float32 and torch.int32"),
        (
            [a, a],
            [a, a.to("meta")],
            "must be on cpu, but accumulator and gradient 1 are on cpu and meta",
        ),
        ([leaf], [a], "a tensor at index 0 requires a gradient"),
        ([a], [leaf], "a tensor at index 0 requires a gradient"),
    ]:
        with pytest.raises(ValueError, match=message):
            accumulate_(accumulators, gradients)
        with pytest.raises(ValueError, match=message):
            accumulate_and_check_(accumulators, gradients, inverse)
    for scalar in (torch.ones(2), torch.ones(1).double(), torch.ones(1, device="meta")):
        for arguments in ((scalar, torch.zeros(1)), (inverse, scalar)):
            with pytest.raises(ValueError, match=r"all tensors must be on|must be one fp32 element"):
                unscale_([a], *arguments)
            with pytest.raises(ValueError, match=r"all tensors must be on|must be one fp32 element"):
                accumulate_and_check_([a], [a], *arguments)
    with pytest.raises(ValueError, match="a tensor at index 0 requires a gradient"):
        unscale_([leaf], inverse)
    with torch.no_grad():
        accumulate_([leaf], [a])

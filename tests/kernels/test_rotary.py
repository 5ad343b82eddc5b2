"""Rotary position embedding on the CPU: the reference implementation, operators, errors and torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpipe_fast.kernels import rotary, rotary_, rotary_backward_, rotary_tables

both_pairings = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def random_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k = torch.randn(2, 7, 4, 24, dtype=dtype), torch.randn(2, 7, 2, 24, dtype=dtype)
    cos, sin = rotary_tables(torch.arange(7), 16)
    return q, k, cos, sin


def rotate_by_complex_product(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Returns the rotation as a product of complex numbers, one per pair of dimensions, in fp64."""
    half = cos.shape[-1]
    rotated, unrotated = x.double().split([2 * half, x.shape[-1] - 2 * half], -1)
    pairs = rotated.unflatten(-1, (half, 2)) if interleaved else rotated.unflatten(-1, (2, half)).mT
    angles = torch.complex(cos.double(), sin.double()).unsqueeze(-2)
    product = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angles)
    return torch.cat([(product if interleaved else product.mT).flatten(-2), unrotated], -1)


@pytest.mark.parametrize(("interleaved", "inverse"), [(False, True), (True, False)])
def test_rotary_operators_pass_opcheck(interleaved: bool, inverse: bool) -> None:
    q, k, cos, sin = random_inputs()
    arguments = (q.requires_grad_(), k.requires_grad_(), cos, sin, interleaved, inverse)
    torch.library.opcheck(torch.ops.gpipe_fast.rotary.default, arguments)
    q, k, cos, sin = random_inputs()
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(torch.ops.gpipe_fast.rotary_.default, (q, k, cos, sin, interleaved, inverse))


@both_pairings
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_rotary_equals_a_complex_product_within_one_rounding(interleaved: bool, dtype: torch.dtype) -> None:
    q, k, cos, sin = random_inputs(dtype)
    for found, x in zip(rotary(q, k, cos, sin, interleaved=interleaved), (q, k), strict=True):
        assert found.dtype == dtype
        exact = rotate_by_complex_product(x, cos, sin, interleaved)
        assert (found.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()


@both_pairings
def test_rotary_passes_gradcheck_and_gradgradcheck(interleaved: bool) -> None:
    cos, sin = (table.double() for table in rotary_tables(torch.arange(2), 4))
    inputs = [torch.randn(1, 2, heads, 6, dtype=torch.float64, requires_grad=True) for heads in (2, 1)]

    def function(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotary(q, k, cos, sin, interleaved=interleaved)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_the_backward_of_rotary_does_not_write_a_gradient_that_others_read() -> None:
    q, k, cos, sin = random_inputs()
    other = torch.zeros_like(q, requires_grad=True)
    (rotary(q.requires_grad_(), k, cos, sin)[0] + other).backward(torch.ones_like(q))
    assert q.grad is not None
    assert other.grad is not None
    assert other.grad.eq(1).all()
    assert not q.grad.eq(1).all()


@both_pairings
def test_a_compiled_rotary_equals_the_eager_one(interleaved: bool) -> None:
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = rotary(q * 2, k, cos, sin, interleaved=interleaved)
        return (q[..., :2, :] * k).square().sum()

    arguments = random_inputs()
    found = []
    for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        q, k = (x.clone().requires_grad_() for x in arguments[:2])
        value = run(q, k, *arguments[2:])
        found.append((value, *torch.autograd.grad(value, (q, k))))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_a_compiled_in_place_rotary_equals_the_eager_one() -> None:
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = q + 1
        rotary_(q, k, cos, sin)
        return q * 2

    q, k, cos, sin = random_inputs()
    own = k.clone()
    expected = function(q, k, cos, sin)
    found = torch.compile(function, backend="aot_eager", fullgraph=True)(q, own, cos, sin)
    assert torch.equal(found, expected)
    assert torch.equal(own, k)


def test_rotary_tables_hold_the_cosines_and_sines_of_the_angles() -> None:
    positions = torch.tensor([[0, 1, 1_000_000], [3, 4, 5]])
    cos, sin = rotary_tables(positions, 8, base=500.0)
    assert cos.shape == sin.shape == (2, 3, 4)
    assert cos.dtype == sin.dtype == torch.float32
    for i in range(4):
        angle = positions.double() / 500.0 ** (2 * i / 8)
        torch.testing.assert_close(cos[..., i].double(), angle.cos(), rtol=0, atol=1e-7)
        torch.testing.assert_close(sin[..., i].double(), angle.sin(), rtol=0, atol=1e-7)
    for dim in (0, -2, 7):
        with pytest.raises(ValueError, match=f"even and positive, got {dim}"):
            rotary_tables(positions, dim)


def test_rotary_rejects_invalid_arguments() -> None:
    q, k, cos, sin = random_inputs()
    for arguments, message in [
        ((q[0], k, cos, sin), "q and k must be"),
        ((q, k[:, :6], cos, sin), "q and k must be"),
        ((q, k[..., :20], cos, sin), "q and k must be"),
        ((q, k, cos[:6], sin[:6]), "tables must be"),
        ((q, k, cos, sin[..., :4]), "tables must be"),
        ((q, k, cos.expand(3, 7, 8), sin.expand(3, 7, 8)), "tables must be"),
        ((q, k, cos[:, :0], sin[:, :0]), "rotary_dim must be"),
        ((q[..., :14], k[..., :14], cos, sin), "rotary_dim must be"),
        ((q.int(), k, cos, sin), "must be floating-point tensors, got torch.int32"),
        ((q, k, cos.to("meta"), sin), "must be on one device, got cpu, cpu, meta, cpu"),
    ]:
        for function in (rotary, rotary_, rotary_backward_):
            with pytest.raises(ValueError, match=message):
                function(*arguments)
    with pytest.raises(ValueError, match="the tables get no gradient"):
        rotary(q, k, cos.clone().requires_grad_(), sin)
    with pytest.raises(ValueError, match="must not require a gradient"):
        rotary_(q.clone().requires_grad_(), k, cos, sin)
    with pytest.raises(ValueError, match="elements overlap in memory"):
        rotary_(q[:, :, :1].expand(2, 7, 3, 24), k, cos, sin)
    with torch.no_grad():
        rotary_(q.clone().requires_grad_(), k, cos, sin)

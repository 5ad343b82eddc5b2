"""The launchers that stages call, with a dtype for each tensor and with optional results, against PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.kernels import activations, gated, reference
from gpipe_fast.kernels.cross_entropy import launch_gradient, launch_losses
from gpipe_fast.kernels.dropout import launch_dropout_add
from gpipe_fast.kernels.philox import Draw
from gpipe_fast.kernels.rotate_half import launch_rotate_half
from gpipe_fast.kernels.stack import launch_stack
from gpipe_fast.randomness.random import make_key
from tests.kernels.numerics.comparison import (
    activated,
    check,
    needs_kernels,
    noncontiguous,
    outputs_and_gradients,
    to_float64,
)

pytestmark = needs_kernels

FP16, FP32, BF16 = torch.float16, torch.float32, torch.bfloat16


@pytest.mark.parametrize("activation", ["gelu", "tanh"])
def test_activations_of_mixed_dtypes_match_pytorch(activation: str) -> None:
    z, g, bias = torch.randn(3, 5, 300).half(), torch.randn(3, 5, 300), torch.randn(300)

    def run(z: Tensor, bias: Tensor, g: Tensor, dtypes: tuple[torch.dtype, ...]) -> list[Tensor]:
        a, dz, dbias = outputs_and_gradients(lambda z, b: activated(z + b, activation), [z, bias], [g])
        return [a.to(dtypes[0]), dz.to(dtypes[1]), dbias]

    found = activations.launch_backward(z, bias, g, activation, True, a_dtype=FP32, dz_dtype=FP16)
    exact = run(*to_float64([z, bias, g]), dtypes=(torch.float64,) * 2)
    check(found, run(z, bias, g, (FP32, FP16)), exact)
    again = activations.launch_forward(z, bias, activation, a_dtype=FP32)
    assert torch.equal(again, found.a)


def test_activation_gradients_are_summed_without_a_bias_on_request() -> None:
    z, g = torch.randn(2, 70, 300).half()
    plain = activations.launch_backward(z, None, g, "silu", False)
    assert (plain.a, plain.dbias) == (None, None)
    summed = activations.launch_backward(z, None, g, "silu", False, with_sums=True, dz_dtype=FP32)
    assert torch.equal(summed.dz.half(), plain.dz)
    torch.testing.assert_close(summed.dbias, summed.dz.sum(0), rtol=1e-5, atol=1e-5)
    biased = activations.launch_backward(z, z[0], g, "silu", False, with_sums=False)
    assert biased.dbias is None


@pytest.mark.parametrize("gate_first", [True, False])
def test_gated_activations_of_mixed_dtypes_match_pytorch(gate_first: bool) -> None:
    gate, up, g = torch.randn(2, 3, 100).half(), torch.randn(2, 3, 100), torch.randn(2, 3, 100)

    def run(gate: Tensor, up: Tensor, g: Tensor, double: bool = False) -> list[Tensor]:
        found = outputs_and_gradients(lambda x, u: activated(x, "silu") * u, [gate, up], [g])
        dtypes = [torch.float64] * 3 if double else [FP16, FP32, FP16]
        return [t.to(dtype) for t, dtype in zip(found, dtypes, strict=True)]

    own = {"a_dtype": FP16, "dz_dtype": FP32, "dup_dtype": FP16}
    found = gated.launch_backward(gate, up, g, "silu", True, **own)
    check(found, run(gate, up, g), run(*to_float64([gate, up, g]), double=True))
    assert torch.equal(gated.launch_forward(gate, up, "silu", a_dtype=FP16), found.a)
    # Packed: the same numbers in one tensor, in either order.
    halves = [gate.float(), up] if gate_first else [up, gate.float()]
    packed = gated.launch_backward(
        torch.cat(halves, -1), None, g, "silu", True, gate_first=gate_first, a_dtype=FP16
    )
    dgate, dup = packed.dz.chunk(2, -1) if gate_first else packed.dz.chunk(2, -1)[::-1]
    assert torch.equal(packed.a, found.a)
    assert torch.equal(dgate, found.dz)
    assert torch.equal(dup.half(), found.dup)
    assert packed.dup is None
    assert gated.launch_backward(gate, up, g, "silu", False).a is None


def test_dropout_of_mixed_dtypes_matches_pytorch() -> None:
    h, residual = torch.randn(3, 7, 33).half(), torch.randn(3, 7, 33)
    draw = Draw(0.75, make_key(7, 2, 1), 5, 1)
    kept = torch.ops.gpipe_fast.keyed_bernoulli(
        draw.key.cpu(), 5, 1, h.shape, 0.25, dtype=torch.bool, device="cpu"
    )
    factor = kept.to(h.device) * 4.0
    found = launch_dropout_add(h, residual, draw)
    assert torch.equal(found, residual + h.float() * factor)
    assert torch.equal(found != residual, kept.to(h.device))
    backward = launch_dropout_add(residual, None, draw, y_dtype=FP16)
    assert torch.equal(backward, (residual * factor).half())
    transposed = launch_dropout_add(h.transpose(0, 1), None, draw)
    assert torch.equal(transposed, h.transpose(0, 1) * factor.view(7, 3, 33).half())


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def eager_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns what transformers computes."""
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


@pytest.mark.parametrize("tables", [1, 2], ids=["one table", "a table per sequence"])
@pytest.mark.parametrize("head_dim", [6, 64, 160])
@pytest.mark.parametrize(
    "dtypes",
    [(FP32, FP32), (FP16, FP16), (FP16, FP32), (BF16, FP32)],
    ids=["fp32", "fp16", "autocast", "bf16"],
)
def test_rotate_half_matches_pytorch(
    dtypes: tuple[torch.dtype, torch.dtype], head_dim: int, tables: int
) -> None:
    q = torch.randn(2, 5, 9, head_dim).transpose(1, 2).to(dtypes[0])
    k = noncontiguous(torch.randn(2, 3, 5, head_dim).to(dtypes[0]))
    # The halves of the tables differ.
    cos, sin = torch.randn(2, tables, 5, head_dim).to(dtypes[1])
    dq, dk = torch.randn_like(q, dtype=dtypes[1]), torch.randn_like(k, dtype=dtypes[1])

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dq: Tensor, dk: Tensor) -> list[Tensor]:
        both = lambda q, k: [eager_rotary(x, cos, sin) for x in (q, k)]  # noqa: E731
        return [
            t.to(torch.promote_types(t.dtype, FP32)) for t in outputs_and_gradients(both, [q, k], [dq, dk])
        ]

    own = {"q_dtype": FP32, "k_dtype": FP32}
    found = [*launch_rotate_half(q, k, cos, sin, **own), *launch_rotate_half(dq, dk, cos, sin, True, **own)]
    given = [q, k, cos, sin, dq, dk]
    check(found, run(*given), run(*to_float64(given)))
    assert found[0].stride() == q.stride()
    alone, absent = launch_rotate_half(q, None, cos, sin, q_dtype=FP32)
    assert torch.equal(alone, found[0])
    assert absent is None


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "classes"), [(5, 10), (3, 700), (2, 40000)])
def test_losses_and_gradients_of_mixed_dtypes_match_pytorch(
    rows: int, classes: int, smoothing: float
) -> None:
    logits = 3 * torch.randn(rows, classes).half()
    target = torch.randint(classes, (rows,))
    target[0] = -100
    scale = torch.tensor(0.7)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_()
        losses = F.cross_entropy(x, target, reduction="none", label_smoothing=smoothing)
        (gradient,) = torch.autograd.grad(losses.sum() * scale, x)
        return losses.detach(), gradient

    found = [
        launch_losses(logits, target, label_smoothing=smoothing),
        launch_gradient(logits, target, scale, label_smoothing=smoothing, dtype=FP32),
    ]
    check(found, run(logits.float()), run(logits.double()))
    narrow = launch_gradient(logits, target, scale, label_smoothing=smoothing)
    assert torch.equal(narrow, found[1].half())
    wide = torch.stack([logits, logits], -1)[..., 0]
    assert torch.equal(launch_losses(wide, target, label_smoothing=smoothing), found[0])


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("length", [5, 150])
def test_stacked_parts_and_their_sums_match_pytorch(length: int, heads_first: bool) -> None:
    # The last dimension of a part in memory: of one head, the heads, and of one head with a gap.
    shapes = torch.randn(2, 3, 70, length), torch.randn(2, 3, length, 70), torch.randn(length, 2, 3, 71)
    parts = [shapes[0].permute(0, 3, 1, 2), shapes[1].transpose(1, 2), shapes[2].transpose(0, 1)[..., 1:]]
    for given in (parts, parts[1:]):
        wide = torch.stack(given, 3 if heads_first else 2).flatten(2).flatten(0, 1)
        matrix, sums = launch_stack(given, heads_first)
        assert torch.equal(matrix, wide)
        check([sums], [wide.sum(0)], [wide.double().sum(0)])


def test_an_empty_loss_and_an_empty_rotation_launch_nothing() -> None:
    empty = torch.empty(0, 10)
    assert launch_losses(empty, torch.empty(0, dtype=torch.int64)).shape == (0,)
    assert launch_gradient(empty, torch.empty(0, dtype=torch.int64), torch.ones(())).shape == (0, 10)
    q, _ = launch_rotate_half(torch.empty(2, 3, 0, 8), None, *torch.empty(2, 1, 0, 8))
    assert q.shape == (2, 3, 0, 8)
    assert reference.keep((2,), 0.5, make_key(1, 1), 0, 0).shape == (2,)

"""Rotary position embedding, against PyTorch."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from gpipe_fast.kernels import rotary, rotary_, rotary_backward_, rotary_tables
from gpipe_fast.kernels.launch import INTERPRETED, Config
from tests.kernels.numerics.comparison import (
    check,
    every_dtype,
    noncontiguous,
    outputs_and_gradients,
    to_float64,
)

# The module; in the package, the function of the same name shadows it.
rotary_module = importlib.import_module("gpipe_fast.kernels.rotary")
both_pairings = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
Arguments = tuple[Tensor, Tensor, Tensor, Tensor]


def eager_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Returns ``x cos + rotated(x) sin``, as models compute it with PyTorch's operators."""
    d = 2 * cos.shape[-1]
    x, rest = x[..., :d], x[..., d:]
    if interleaved:
        cos, sin = (table.repeat_interleave(2, -1) for table in (cos, sin))
        rotated = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    else:
        cos, sin = (torch.cat([table, table], -1) for table in (cos, sin))
        rotated = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
    cos, sin = (table.unsqueeze(-2).to(x.dtype) for table in (cos, sin))
    return torch.cat([x * cos + rotated * sin, rest], -1)


def random_inputs(
    batch: int, length: int, heads: tuple[int, int], head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> tuple[Arguments, tuple[Tensor, Tensor]]:
    """Returns arguments for `rotary`, and gradients of both results."""
    q, dq = torch.randn(2, batch, length, heads[0], head_dim, dtype=dtype)
    k, dk = torch.randn(2, batch, length, heads[1], head_dim, dtype=dtype)
    return (q, k, *rotary_tables(torch.arange(length), rotary_dim)), (dq, dk)


def compare_with_pytorch(arguments: Arguments, gradients: tuple[Tensor, Tensor], interleaved: bool) -> None:
    q, k, cos, sin = arguments

    def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        return [eager_rotary(x, cos, sin, interleaved) for x in (q, k)]

    def eager_outputs_and_gradients(
        tables: tuple[Tensor, Tensor], q: Tensor, k: Tensor, *g: Tensor
    ) -> list[Tensor | None]:
        return outputs_and_gradients(lambda q, k: eager(q, k, *tables), [q, k], g)

    ours = outputs_and_gradients(
        lambda q, k: rotary(q, k, cos, sin, interleaved=interleaved), [q, k], list(gradients)
    )
    wide = (cos.double(), sin.double())
    check(
        ours,
        eager_outputs_and_gradients((cos, sin), q, k, *gradients),
        eager_outputs_and_gradients(wide, *to_float64([q, k, *gradients])),
    )

    own = [x.contiguous().clone() for x in (q, k, *gradients)]
    for function, pair in ((rotary_, own[:2]), (rotary_backward_, own[2:])):
        returned = function(*pair, cos, sin, interleaved=interleaved)
        assert all(a is b for a, b in zip(returned, pair, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(own, ours, strict=True))


@every_dtype
@both_pairings
@pytest.mark.parametrize("length", [1, 63, 100])
def test_rotary_matches_pytorch_for_every_length(length: int, interleaved: bool, dtype: torch.dtype) -> None:
    compare_with_pytorch(*random_inputs(1, length, (2, 1), 32, 32, dtype), interleaved)


@pytest.mark.parametrize(("length", "interleaved"), [(1000, True), (4097, False)])
def test_rotary_of_long_sequences_matches_pytorch(
    length: int, interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if INTERPRETED:  # the interpreter's time depends on the number of blocks
        monkeypatch.setattr(rotary_module, "CONFIGS", {1 << 62: Config({"POSITIONS": 128, "HEADS": 8})})
    (q, k, cos, sin), _ = random_inputs(1, length, (2, 1), 16, 16, torch.float32)
    ours = rotary(q, k, cos, sin, interleaved=interleaved)
    eager, truth = (
        [eager_rotary(x, *tables, interleaved) for x in pair]
        for pair, tables in (((q, k), (cos, sin)), ((q.double(), k.double()), (cos.double(), sin.double())))
    )
    check(ours, eager, truth)


@every_dtype
@both_pairings
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [
        (2, 2),
        (63, 62),
        (64, 64),
        (100, 100),
        (80, 32),
        (128, 128),
        (128, 2),
        (129, 126),
        (1000, 1000),
        (4097, 4096),
    ],
)
def test_rotary_matches_pytorch_for_every_head_dimension(
    head_dim: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype
) -> None:
    compare_with_pytorch(*random_inputs(2, 5, (3, 2), head_dim, rotary_dim, dtype), interleaved)


@both_pairings
@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (32, 4), (1, 9), (63, 1), (100, 10)])
def test_rotary_matches_pytorch_for_every_number_of_heads(heads: tuple[int, int], interleaved: bool) -> None:
    compare_with_pytorch(*random_inputs(2, 3, heads, 16, 12, torch.float32), interleaved)


@every_dtype
@both_pairings
def test_rotary_of_noncontiguous_tensors_matches_pytorch(interleaved: bool, dtype: torch.dtype) -> None:
    (q, k, cos, sin), (dq, dk) = random_inputs(2, 5, (3, 3), 24, 16, dtype)
    compare_with_pytorch(
        (noncontiguous(q), noncontiguous(k), noncontiguous(cos), noncontiguous(sin)),
        (noncontiguous(dq), noncontiguous(dk)),
        interleaved,
    )
    # q is (batch, heads, length, head_dim) in memory, and the last dimension of k is outermost.
    inner, outer = (x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) for x in (q, dq))
    compare_with_pytorch(
        (inner, k.transpose(0, 3).contiguous().transpose(0, 3), cos, sin), (outer, dk), interleaved
    )
    # q and k are views of one product, and dq is broadcast.
    product = torch.randn(2, 5, 9, 24, dtype=dtype)
    expanded_dq = dq[:1, :1, :1].expand_as(dq)
    compare_with_pytorch((product[:, :, :3], product[:, :, 3:6], cos, sin), (expanded_dq, dk), interleaved)
    one = dq[..., :1].expand_as(dq)
    compare_with_pytorch((one, k[:, :, :1].expand_as(k), cos, sin), (one, dk), interleaved)


@both_pairings
def test_rotary_in_place_writes_only_the_elements_of_noncontiguous_views(interleaved: bool) -> None:
    (q, k, cos, sin), _ = random_inputs(2, 5, (3, 2), 24, 16, torch.float32)
    expected = rotary(q, k, cos, sin, interleaved=interleaved)
    product = torch.full((2, 5, 7, 24), 7.0)
    product[:, :, 1:4], product[:, :, 4:6] = q, k
    rotary_(product[:, :, 1:4], product[:, :, 4:6], cos, sin, interleaved=interleaved)
    assert torch.equal(product[:, :, 1:4], expected[0])
    assert torch.equal(product[:, :, 4:6], expected[1])
    assert (product[:, :, [0, 6]] == 7).all()
    interleaved_q = torch.stack([q, torch.full_like(q, 7.0)], -1)
    rotary_(interleaved_q[..., 0], k, cos, sin, interleaved=interleaved)
    assert torch.equal(interleaved_q[..., 0], expected[0])
    assert (interleaved_q[..., 1] == 7).all()


@both_pairings
def test_rotary_with_positions_per_sequence_matches_pytorch(interleaved: bool) -> None:
    (q, k, _, _), gradients = random_inputs(3, 5, (3, 2), 24, 16, torch.float32)
    positions = torch.stack([torch.arange(5), torch.arange(5) + 100_000, torch.tensor([0, 1, 0, 1, 2])])
    compare_with_pytorch((q, k, *rotary_tables(positions, 16)), gradients, interleaved)
    compare_with_pytorch((q, k, *rotary_tables(positions[1:2], 16)), gradients, interleaved)
    compare_with_pytorch((q, k, *(t.half() for t in rotary_tables(positions, 16))), gradients, interleaved)


@pytest.mark.parametrize(
    ("batch", "length", "heads"), [(0, 3, (2, 1)), (2, 0, (2, 1)), (2, 3, (0, 0)), (2, 3, (2, 0))]
)
def test_rotary_of_empty_tensors_is_empty(batch: int, length: int, heads: tuple[int, int]) -> None:
    compare_with_pytorch(*random_inputs(batch, length, heads, 8, 8, torch.float32), False)


def test_the_backward_of_rotary_can_be_differentiated() -> None:
    (q, k, cos, sin), (dq, _) = random_inputs(1, 3, (2, 1), 8, 6, torch.float32)
    weights = torch.randn_like(q)
    g = dq.requires_grad_()
    (back,) = torch.autograd.grad(rotary(q.requires_grad_(), k, cos, sin)[0], q, g, create_graph=True)
    (again,) = torch.autograd.grad(back, g, weights)
    torch.testing.assert_close(again, rotary(weights, k, cos, sin)[0])


def test_rotary_of_fp64_is_computed_in_fp64() -> None:
    (q, k, cos, sin), _ = random_inputs(1, 3, (2, 1), 8, 6, torch.float64)
    torch.testing.assert_close(
        rotary(q, k, cos, sin)[0], eager_rotary(q, cos, sin, False), rtol=1e-14, atol=1e-14
    )

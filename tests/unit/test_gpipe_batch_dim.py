"""Batch dimensions other than the first: cut and joined as by a plain loop over x.chunk(M, dim)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, keyed_rng, replicate, verify
from gpipe_fast.balance import profile_layers
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.layers.structure import BatchDim
from tests.internals import compiler_of
from tests.reference import SEED, Result, collect, leaf, unequal
from tests.untraceable import WIDTH, FunctionLayer, Recurrent, without_warnings

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH, BATCH = 5, 7


def sequences() -> Tensor:
    """Returns sequences of shape [time, batch, features]."""
    return torch.randn(LENGTH, BATCH, WIDTH, generator=torch.Generator().manual_seed(1))


def encoder() -> nn.Sequential:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), layer, nn.LayerNorm(WIDTH))


class TimeFirst(Recurrent):
    """A recurrent layer with time first. It runs in Python."""

    def __init__(self) -> None:
        super().__init__(nn.GRU)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


def with_python_layer() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), TimeFirst(), nn.Dropout(0.5), nn.Tanh())


def step(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> Result:
    model.zero_grad()
    x = leaf(x)
    torch.manual_seed(SEED)
    return collect(model, x, call(x))


def loop(model: nn.Sequential, chunks: int, dim: int) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with keyed_rng(model):
            return torch.cat([model(c) for c in x.chunk(chunks, dim)], dim)

    return run


@pytest.mark.smoke
@pytest.mark.parametrize(("make", "dim"), [(encoder, 1), (with_python_layer, -2)])
def test_a_step_equals_the_plain_loop(make: Callable[[], nn.Sequential], dim: int) -> None:
    """With or without a layer in Python, with unequal micro-batches, in every checkpoint mode, twice."""
    model, x = make(), sequences()
    expected = step(loop(model, 4, dim), model, x)
    pipe = GPipe(model, [2, 2], chunks=4, batch_dim=dim)
    with without_warnings():
        for pipe.checkpoint in CHECKPOINT_MODES:
            for _ in range(2):
                assert unequal(step(pipe, model, x), expected) == []


def test_sequences_of_many_lengths_share_a_trace() -> None:
    """The gradient of a micro-batch is a slice of the mini-batch's: its strides have gaps."""
    model = encoder()
    pipe = GPipe(model, [2, 2], chunks=2, batch_dim=1)
    num_traces = []
    for length in (5, 6, 7, 9, 11):
        x = torch.randn(length, 4, WIDTH, generator=torch.Generator().manual_seed(length))
        expected = step(loop(model, 2, 1), model, x)
        assert unequal(step(pipe, model, x), expected) == [], length
        num_traces.append(compiler_of(pipe).num_traces)
    assert num_traces[1] < num_traces[2] == num_traces[-1]


@pytest.mark.parametrize("backend", ["aten", "eager"])
def test_micro_batches_have_the_strides_of_chunks(backend: str) -> None:
    x = sequences()

    def double(held: nn.Module, x: Tensor) -> Tensor:
        assert x.stride() == strides
        return x * 2

    strides = x.chunk(4, 1)[0].stride()
    layers = nn.Sequential(FunctionLayer(double))
    assert torch.equal(GPipe(layers, [1], chunks=4, batch_dim=1, backend=backend)(x), x * 2)


class Attend(nn.Module):
    """Takes a sequence with the batch second, a mask with the batch first, and a table without a batch."""

    def forward(self, value: Any) -> tuple[Tensor, Tensor]:
        x, mask, table = value
        y = (x + table) * mask.t().unsqueeze(-1)
        return y, y.sum(0, keepdim=True)


def test_each_tensor_has_its_own_batch_dim() -> None:
    """Replicated tensors have none. Outputs are joined along the first entry of batch_dim."""
    x, mask, table = sequences(), torch.rand(BATCH, LENGTH), torch.randn(WIDTH)
    pipe = GPipe(nn.Sequential(Attend()), [1], chunks=3, batch_dim=(1, 0))
    found = pipe((x, mask, replicate(table)))
    parts = [Attend()((a, b, table)) for a, b in zip(x.chunk(3, 1), mask.chunk(3, 0), strict=True)]
    for ours, theirs in zip(found, zip(*parts, strict=True), strict=True):
        assert torch.equal(ours, torch.cat(theirs, 1))
    assert pipe.batch_dim == (1, 0)
    assert verify(pipe, (x.requires_grad_(), mask, replicate(table)), lambda y: y[0].square().mean()).ok


def test_the_batch_size_is_taken_along_batch_dim() -> None:
    """By chunks='auto', the measurement for a balance, profiles, recordings and verify."""
    model, x = encoder(), sequences()
    pipe = GPipe(model, devices=["cpu"] * 2, chunks="auto", batch_dim=1)
    with pipe.recording() as recording:
        y = pipe(x)
    assert recording.phases()[0].num_microbatches == BATCH
    assert y.shape == x.shape
    assert verify(pipe, x, lambda y: y.square().mean()).ok
    assert len(profile_layers(pipe, x, timeout=None, chunks=BATCH)) == 4
    pipe.batch_dim = 0
    with pipe.recording() as recording, without_warnings():
        pipe(x)
    assert recording.phases()[0].num_microbatches == LENGTH


class Last(nn.Module):
    """Drops the time dimension, so that the batch comes first."""

    def forward(self, x: Tensor) -> Tensor:
        return x[-1]


class Swapped(nn.Module):
    """Takes and returns a tensor with the batch first, and another one with the batch elsewhere."""

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return value[0] * 2, value[1] * 3


ERRORS: list[tuple[BatchDim, Any, nn.Module, type[Exception], str]] = [
    (1, torch.randn(8), nn.Tanh(), ValueError, r"no dimension 1 \(batch_dim\) to split .* got shape \[8\]"),
    ((0, 1), (torch.randn(8, 6),) * 2, nn.Tanh(), ValueError, r"dimensions \[0, 1\] \(batch_dim\); got \[8"),
    (1, sequences(), Last(), RuntimeError, r"shape \[2, 8\] for a micro-batch of 2, .* not in dimension 1,"),
    (2, torch.randn(2, 3, 8), Last(), RuntimeError, r"shape \[3, 2\] for .* not in dimension 2, along"),
    (
        (0, 1),
        (torch.randn(8, 4, 6), torch.randn(3, 8, 5)),
        Swapped(),
        RuntimeError,
        r"output 1 .* \[3, 2, 5\]",
    ),
    (
        (0, 1),
        (torch.randn(8, 4, 6), torch.randn(2, 8, 5)),
        Swapped(),
        RuntimeError,
        r"0, along .* or in 1; pass",  # although the output has as many rows as the micro-batch
    ),
]


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask.t()[..., None]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 8])
def test_the_only_output_is_like_the_first_input_at_any_size(length: int) -> None:
    x, mask = torch.randn(length, 8, 5), torch.randn(8, length)
    pipe = GPipe(nn.Sequential(Masked()), [1], chunks=4, batch_dim=(1, 0))
    assert torch.equal(pipe(x, mask), Masked()(x, mask))


@pytest.mark.parametrize("backend", ["aten", "eager"])
def test_values_that_contradict_batch_dim_are_refused(backend: str) -> None:
    for dim, x, layer, kind, message in ERRORS:
        pipe = GPipe(nn.Sequential(layer), [1], chunks=4, batch_dim=dim, backend=backend)
        with pytest.raises(kind, match=message):
            pipe(x)

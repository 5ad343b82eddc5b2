"""Pitfalls of tracing that give wrong numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

from gpipe_fast import GPipe
from gpipe_fast.lower import operators
from gpipe_fast.trace import joint_export
from tests.reference import check_step, loop_step, pipeline_step, unequal
from tests.unit.trace.pitfalls import batch, linear

pytestmark = pytest.mark.usefixtures("one_thread")


class InputAndTanh(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.tanh()


class MultipliesPair(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


# Outputs that alias an input or each other


def test_outputs_that_alias_the_input_equal_the_plain_loop() -> None:
    check_step(nn.Sequential(linear(), InputAndTanh(), MultipliesPair()), batch(), balance=[2, 1])
    check_step(nn.Sequential(InputAndTanh(), MultipliesPair(), linear()), batch(), balance=[1, 2])


# Strides


def test_a_permuted_boundary_gradient_is_coerced() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Hardtanh(-9, 9))
    x = batch(3, 6, 6)
    gradient = torch.randn(8, 4, 4, 4).transpose(1, 3)
    ours = pipeline_step(GPipe(model, [2], chunks=4), x, 0.0, gradient=gradient)
    torch.testing.assert_close(ours, loop_step(model, x, 4, gradient=gradient))


# Operators with Python decompositions


def test_upsampling_is_wrong_through_python_decompositions_alone() -> None:
    model, x = nn.Sequential(nn.Upsample(scale_factor=1.7, mode="bicubic")), batch(3, 5, 4)
    check_step(model, x)
    with mock.patch.object(joint_export, "without_python_decompositions", contextlib.nullcontext):
        assert unequal(pipeline_step(GPipe(model, [1], chunks=4), x), loop_step(model, x, 4)) != []


# Inference


def encoder() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True)).eval()


def test_inference_has_a_trace_of_its_own() -> None:
    model, x = encoder(), batch(5, 8)
    with torch.no_grad():
        plain = torch.cat([model(c) for c in x.chunk(4)])
        assert torch.equal(GPipe(model, [1], chunks=4)(x), plain)


# Autocast


class LinearTwiceUnderAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(self.linear(x).relu()).float()


@contextlib.contextmanager
def without_autocast_cache() -> Iterator[None]:
    torch.set_autocast_cache_enabled(False)
    yield
    torch.set_autocast_cache_enabled(True)


def test_autocast_equals_the_plain_loop_without_the_weight_cache() -> None:
    with without_autocast_cache():
        expected = loop_step(nn.Sequential(LinearTwiceUnderAutocast()), batch(), 4)
    ours = pipeline_step(GPipe(nn.Sequential(LinearTwiceUnderAutocast()), [1], chunks=4), batch(), 0.0)
    assert unequal(ours, expected) == []


# Out variants that write more than their result


def test_the_out_variant_of_a_reduced_loss_writes_past_its_result() -> None:
    a, b = batch().sigmoid(), batch(seed=2).sigmoid()
    memory = torch.full((1000,), float("nan"))
    torch.ops.aten.huber_loss.out(a, b, 1, 1.0, out=memory[:1].view(()))
    assert int((~memory.isnan()).sum()) == a.numel()  # the result has one element
    node = fx.Graph().call_function(torch.ops.aten.huber_loss.default, (a, b))
    assert operators.out_call(node) is None

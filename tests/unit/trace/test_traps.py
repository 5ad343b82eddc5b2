"""The traps of tracing that give wrong numbers: each with its rule, and without."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import gpipe_fast.runtime.compile
from gpipe_fast import GPipe
from gpipe_fast.lower import operators
from gpipe_fast.trace import aot, function, trace
from gpipe_fast.trace.refuse import Untraceable
from gpipe_fast.trace.trace import Joint, Role
from tests.inside import with_autocast_cache
from tests.reference import check_step, loop_step, pipeline_step, unequal
from tests.unit.trace.traps import batch, differences, linear, run_joint, traced

pytestmark = pytest.mark.usefixtures("one_thread")


class Both(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.tanh()


class Product(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


# Outputs that alias an input or each other


@contextlib.contextmanager
def without_clones() -> Iterator[None]:
    def uncloned(*args: Any, **kwargs: Any) -> Joint | Untraceable:
        with mock.patch.object(Tensor, "clone", lambda self, **kwargs: self):
            return trace.trace(*args, **kwargs)

    with mock.patch.object(gpipe_fast.runtime.compile, "trace", uncloned):
        yield


def test_aliased_outputs() -> None:
    check_step(nn.Sequential(linear(), Both(), Product()), batch(), balance=[2, 1])
    check_step(nn.Sequential(Both(), Product(), linear()), batch(), balance=[1, 2])


def test_aliased_outputs_without_rule_are_wrong() -> None:
    model = nn.Sequential(Both(), Product(), linear())
    with without_clones():
        joint = gpipe_fast.runtime.compile.trace([model[0]], [batch().requires_grad_()])
        # The output that is the input itself gets no tangent, so its share of the gradient is lost.
        assert isinstance(joint, Joint)
        assert joint.differentiable_outputs() == {1}
    assert traced(model[0], x=batch().requires_grad_()).differentiable_outputs() == {0, 1}


# Random operations under recompute


def test_recomputed_random_operations() -> None:
    model = nn.Sequential(linear(), nn.Dropout(0.5), nn.RReLU(), nn.AlphaDropout(0.2), linear(1))
    check_step(model, batch())


def test_recomputed_random_operations_without_rule_are_wrong() -> None:
    class Unkeyed(contextlib.nullcontext):  # type: ignore[type-arg]
        unfused_attention = False

        def __init__(self, key: Tensor, observer: object) -> None:
            super().__init__()

        def enter_layer(self, layer: int) -> None:
            pass

    pipe = GPipe(nn.Sequential(nn.Dropout(0.5)), [1])
    with (
        mock.patch.object(function, "_Mode", Unkeyed),
        mock.patch.object(trace, "refuse_graph", return_value=None),
    ):
        step = pipeline_step(pipe, batch(64), 0.0)
    assert step["output"] is not None
    assert step["input gradient"] is not None
    assert not torch.equal(step["output"] == 0, step["input gradient"] == 0)


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.4)


def test_attention_dropout() -> None:
    check_step(nn.Sequential(linear(), Attention(), linear(1)), batch(2, 5, 6))


# Strides


def test_strides_are_in_the_signature() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    x = batch(3, 6, 6)
    pipe = GPipe(model, [5], chunks=4)
    for laid_out in (x, x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3)):
        assert unequal(pipeline_step(pipe, laid_out, 0.0), loop_step(model, laid_out, 4)) == []


def test_a_permuted_boundary_gradient_is_coerced() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Hardtanh(-9, 9))
    x = batch(3, 6, 6)
    gradient = torch.randn(8, 4, 4, 4).transpose(1, 3)
    ours = pipeline_step(GPipe(model, [2], chunks=4), x, 0.0, gradient=gradient)
    torch.testing.assert_close(ours, loop_step(model, x, 4, gradient=gradient))


def test_a_permuted_boundary_gradient_without_rule_is_wrong() -> None:
    # A program's views have the strides that were traced; over memory laid out otherwise they read this.
    (node,) = traced(nn.Tanh(), x=batch(3, 6, 6).requires_grad_()).of(Role.TANGENT).values()
    gradient = batch(6, 6, 3).transpose(1, 3)
    read = gradient.as_strided(gradient.shape, node.meta["val"].stride())
    assert read.shape == gradient.shape
    assert not torch.equal(read, gradient)


# Gradients that never come


class Root(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, (x * 0).sqrt()


class First(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + 1


def test_an_unused_output_gets_no_gradient() -> None:
    check_step(nn.Sequential(Root(), First(), linear()), batch(), balance=[1, 2])


def test_an_unused_output_without_rule_is_nan() -> None:
    x = batch().requires_grad_()
    one, zero = torch.ones(8, 6), torch.zeros(8, 6)
    wrong = run_joint(traced(Root(), x=x), [Root()], x, one, zero)
    right = run_joint(traced(Root(), x=x, arrivals=((1, None),)), [Root()], x, one)
    assert wrong[Role.INPUT_GRADIENT, 0].isnan().any()
    assert torch.equal(right[Role.INPUT_GRADIENT, 0], 2 * one)


# Buffers


UPSAMPLING = {"bilinear": (3, 5, 4), "bicubic": (3, 5, 4), "trilinear": (2, 3, 4, 3)}


@pytest.mark.parametrize("mode", UPSAMPLING)
def test_upsampling(mode: str) -> None:
    check_step(nn.Sequential(nn.Upsample(scale_factor=1.7, mode=mode)), batch(*UPSAMPLING[mode]))


@pytest.mark.parametrize("mode", UPSAMPLING)
def test_upsampling_without_rule_is_wrong(mode: str) -> None:
    model = nn.Sequential(nn.Upsample(scale_factor=1.7, mode=mode))
    with mock.patch.object(aot, "without_python_decompositions", contextlib.nullcontext):
        assert differences(model, batch(*UPSAMPLING[mode])) != []


def encoder() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True)).eval()


def test_inference_is_traced_by_itself() -> None:
    model, x = encoder(), batch(5, 8)
    with torch.no_grad():
        plain = torch.cat([model(c) for c in x.chunk(4)])
        assert torch.equal(GPipe(model, [1], chunks=4)(x), plain)


def test_inference_without_rule_is_wrong() -> None:
    # Without gradients the layer calls one fused operator, which rounds differently from the joint graph.
    model, x = encoder(), batch(5, 8)
    with torch.no_grad():
        plain = model(x)
    traced_with_gradients = GPipe(model, [1])(x)
    assert not torch.equal(plain, traced_with_gradients)
    torch.testing.assert_close(plain, traced_with_gradients)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(self.linear(x).relu()).float()


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    torch.set_autocast_cache_enabled(False)
    yield
    torch.set_autocast_cache_enabled(True)


def test_autocast_without_its_weight_cache() -> None:
    with uncached():
        expected = loop_step(nn.Sequential(Twice()), batch(), 4)
    ours = pipeline_step(GPipe(nn.Sequential(Twice()), [1], chunks=4), batch(), 0.0)
    assert unequal(ours, expected) == []


def test_autocast_without_rule_is_wrong() -> None:
    # The cached cast sums the gradients of both uses in bfloat16. While tracing the cache is never filled on
    # this version of PyTorch, so taking the rule out of the trace alone changes nothing.
    cached = loop_step(nn.Sequential(Twice()), batch(), 4)
    with uncached():
        expected = loop_step(nn.Sequential(Twice()), batch(), 4)
    assert "gradient of 0.linear.weight" in unequal(cached, expected)
    with with_autocast_cache():
        assert differences(nn.Sequential(Twice()), batch()) != []
        ours = pipeline_step(GPipe(nn.Sequential(Twice()), [1], chunks=4), batch(), 0.0)
    assert unequal(ours, expected) == []


# Constants


class Loss(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.loss = kind()

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(x.sigmoid(), x.detach().flip(1).sigmoid()).reshape(1)


@pytest.mark.parametrize("kind", [nn.BCELoss, nn.HuberLoss, nn.MSELoss, nn.SmoothL1Loss, nn.SoftMarginLoss])
def test_reduced_losses(kind: type[nn.Module]) -> None:
    check_step(nn.Sequential(linear(), Loss(kind)), batch())


def test_reduced_losses_without_rule_overwrite_their_neighbours() -> None:
    a, b = batch().sigmoid(), batch(seed=2).sigmoid()
    memory = torch.full((1000,), float("nan"))
    torch.ops.aten.huber_loss.out(a, b, 1, 1.0, out=memory[:1].view(()))
    assert int((~memory.isnan()).sum()) == a.numel()  # one number was asked for
    node = fx.Graph().call_function(torch.ops.aten.huber_loss.default, (a, b))
    assert operators.writing(node) is None


# What fails to trace, loudly

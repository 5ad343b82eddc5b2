"""Pitfalls of tracing that lose or leak state, each tested with and without the rule that avoids it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from gpipe_fast import GPipe
from gpipe_fast.trace import trace
from gpipe_fast.trace.joint_graph import GraphRole, buffers_of
from tests.reference import check_step, leaf, loop_step, pipeline_step, unequal
from tests.unit.trace.pitfalls import batch, linear, refusal_reason, run_joint, traced

pytestmark = pytest.mark.usefixtures("one_thread")


class Average(nn.Module):
    """Scales by a moving average that it updates. Its backward depends on the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.abs().mean(), alpha=0.1)
        return x * self.average.clone()


STATEFUL = {
    "average": lambda: nn.Sequential(linear(), Average(), linear(1)),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(linear()), nn.Tanh()),
    "batch norm": lambda: nn.Sequential(linear(), nn.BatchNorm1d(6), nn.Tanh()),
}


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("chunks", [1, 4])
def test_recomputing_a_layer_that_updates_a_buffer_it_reads_equals_the_plain_loop(
    name: str, chunks: int
) -> None:
    check_step(STATEFUL[name](), batch(), chunks)


@pytest.mark.parametrize("name", ["average", "spectral norm"])
def test_recomputing_with_the_updated_buffer_is_wrong(name: str) -> None:
    layers, x, one = list(STATEFUL[name]()), batch().requires_grad_(), torch.ones(8, 6)
    joint = traced(*layers, x=x)
    before = run_joint(joint, layers, x, one)
    with torch.no_grad():
        for index, buffer in enumerate(buffers_of(layers)):
            buffer.copy_(before[GraphRole.BUFFER, index])
    after = run_joint(joint, layers, x, one)
    gradients = [key for key in before if key[0] is GraphRole.PARAMETER_GRADIENT]
    assert not all(torch.equal(before[key], after[key]) for key in gradients)


def test_a_failure_in_a_later_stage_leaves_buffers_unchanged() -> None:
    class LargeIndices(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x[:, 0] * 1e6).long().abs()

    model = nn.Sequential(nn.BatchNorm1d(6), LargeIndices(), nn.Embedding(3, 2))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises((IndexError, RuntimeError), match="index out of range"):
        GPipe(model, [1, 1, 1], chunks=4)(batch())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class ReplacesBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.ema = self.ema * 0.9 + x.detach().mean(0) * 0.1
        return x - self.ema


def test_a_replaced_buffer_is_refused() -> None:
    layer = ReplacesBuffer()
    original = layer.ema
    assert "a side effect" in refusal_reason(layer, x=batch())
    assert layer.ema is original


# Layers that trace to something else


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_are_refused(kind: type[nn.RNNBase]) -> None:
    assert "recurrent" in refusal_reason(kind(6, 6), x=batch(5, 6))


def test_a_layer_that_changes_a_parameter_is_refused() -> None:
    indices = torch.arange(6).expand(8, 6)
    assert "max_norm" in refusal_reason(nn.Embedding(6, 4, max_norm=0.5), x=indices)


def test_without_the_check_a_layer_that_changes_a_parameter_fails_to_trace() -> None:
    # The trace returns the changed parameter as an extra output, for which there is no port.
    indices = torch.arange(6).expand(8, 6)
    with mock.patch.object(trace, "check_layers", return_value=None):
        assert refusal_reason(nn.Embedding(6, 4, max_norm=0.5), x=indices)


class UsesConstants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.linspace(0, 1, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, [0, 2, 4, 1, 3, 5]] * torch.tensor(2.0) + self.plain


def test_constants_equal_the_plain_loop() -> None:
    check_step(nn.Sequential(linear(), UsesConstants()), batch())


class UnregisteredParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Parameter(torch.ones(6))]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.hidden[0]


def test_an_unregistered_parameter_is_refused() -> None:
    assert "requires a gradient" in refusal_reason(UnregisteredParameter(), x=batch())


def test_without_the_check_an_unregistered_parameter_gets_no_gradient() -> None:
    layer = UnregisteredParameter()
    with mock.patch.object(trace, "check_graph", return_value=None):
        GPipe(nn.Sequential(linear(), layer), [2])(batch()).sum().backward()
    assert layer.hidden[0].grad is None


# Side effects


class KeepsInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return x * 2


def test_a_layer_that_keeps_its_input_is_refused() -> None:
    layer = KeepsInput()
    assert "a side effect" in refusal_reason(layer, x=batch())
    assert not hasattr(layer, "last")


def test_hooks_are_refused() -> None:
    layer = linear()
    layer.register_forward_hook(lambda *_: None)
    assert "hook" in refusal_reason(layer, x=batch())


# Changes after the first call


def _set_dropout(model: nn.Sequential) -> None:
    model[1].p = 0.9


def _replace_weight(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().double().float() * 2)


def _freeze(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(False)


def _unfreeze(model: nn.Sequential) -> None:
    model[2].requires_grad_(True)


CHANGES = {"attribute": _set_dropout, "replaced": _replace_weight, "frozen": _freeze, "unfrozen": _unfreeze}


def changeable() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Dropout(0.1), linear(1).requires_grad_(False))


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_the_first_call_takes_effect(name: str) -> None:
    model = changeable()
    pipe = GPipe(model, [3], chunks=4)
    pipeline_step(pipe, batch(), 0.0)
    CHANGES[name](model)
    assert unequal(pipeline_step(pipe, batch(), 0.0), loop_step(model, batch(), 4)) == []


# Layers whose trace fails


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.linear, x, use_reentrant=True)


class Masked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class ValidatesArguments(nn.Module):
    """Validates argument values explicitly, because torch.compile, once used, turns off this default."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.distributions.Normal(x, 1.0, validate_args=True).rsample()


def test_a_reentrant_checkpoint_equals_the_plain_loop() -> None:
    check_step(nn.Sequential(nn.Tanh(), Reentrant(), nn.Tanh()), batch())


@pytest.mark.parametrize("kind", [Branch, Masked, ValidatesArguments])
def test_an_untraceable_layer_is_named_in_the_error(kind: type[nn.Module]) -> None:
    layer = kind()
    x = leaf(batch())
    assert refusal_reason(nn.Tanh(), layer, x=x).startswith(("PyTorch cannot trace it", "tracing raised"))
    with pytest.raises(RuntimeError, match=rf"layer 1 \({kind.__name__}\)"):
        GPipe(nn.Sequential(nn.Tanh(), layer, nn.Tanh()), [3], backend="aten")(x)

"""Each trap of tracing: with the rule against it the plain loop's numbers, without it wrong ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from reference import check_step, leaf, loop_step, pipeline_step, unequal
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import gpipe_fast.compile
import gpipe_fast.gpipe
from gpipe_fast import GPipe, aot, operators, refuse, trace
from gpipe_fast.arrival import Arrivals
from gpipe_fast.refuse import Untraceable
from gpipe_fast.trace import Joint, Role, buffers_of, parameters_of

pytestmark = pytest.mark.usefixtures("one_thread")


def differences(model: nn.Sequential, x: Tensor, budget: float = 0.0, balance: Any = None) -> list[str]:
    """What a pipeline of four micro-batches gets wrong."""
    pipe = GPipe(model, balance or [len(model)], chunks=4)
    return unequal(pipeline_step(pipe, x, budget), loop_step(model, x, 4))


def traced(*layers: nn.Module, x: Tensor, arrivals: Arrivals = ()) -> Joint:
    joint = trace.trace(list(layers), [x], arrivals)
    assert isinstance(joint, Joint), joint
    return joint


def refused(*layers: nn.Module, x: Tensor) -> str:
    joint = trace.trace(list(layers), [x])
    assert isinstance(joint, Untraceable), "the layers were traced"
    return joint.reason


def run_joint(joint: Joint, layers: list[nn.Module], x: Tensor, *tangents: Tensor) -> dict[Any, Tensor]:
    """Every result of a joint graph by port, run eagerly as traced: no strides checked, none coerced."""
    given = {
        Role.PARAMETER: parameters_of(layers),
        Role.BUFFER: buffers_of(layers),
        Role.KEY: [torch.zeros(3, dtype=torch.int64)],
        Role.INPUT: [x],
        Role.TANGENT: tangents,
    }
    interpreter = fx.Interpreter(joint.module, garbage_collect_values=False)
    with torch.no_grad():
        interpreter.run(*(given[p.role][p.index].detach() for p, _ in joint.inputs))
    return {(port.role, port.index): interpreter.env[node] for port, node in joint.outputs}


def linear(seed: int = 0, width: int = 6) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(width, width)


def batch(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(8, *(shape or (6,)), generator=torch.Generator().manual_seed(seed))


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

    with mock.patch.object(gpipe_fast.compile, "trace", uncloned):
        yield


def test_aliased_outputs() -> None:
    check_step(nn.Sequential(linear(), Both(), Product()), batch(), balance=[2, 1])
    check_step(nn.Sequential(Both(), Product(), linear()), batch(), balance=[1, 2])


def test_aliased_outputs_without_rule_are_wrong() -> None:
    model = nn.Sequential(Both(), Product(), linear())
    with without_clones():
        joint = gpipe_fast.compile.trace([model[0]], [batch().requires_grad_()])
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
        def enter_layer(self, layer: int) -> None:
            pass

    pipe = GPipe(nn.Sequential(nn.Dropout(0.5)), [1])
    with (
        mock.patch.object(trace, "KeyedRandomMode", Unkeyed),
        mock.patch.object(refuse, "_draws", return_value=False),
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


def test_attention_dropout_without_rule_takes_the_same_path_on_the_cpu() -> None:
    # The CPU's fused kernel takes no dropout, so PyTorch itself chooses the unfused path; only on CUDA does a
    # kernel draw for itself.
    with mock.patch.object(gpipe_fast.random, "_UnfusedAttention", contextlib.nullcontext):
        assert differences(nn.Sequential(linear(), Attention(), linear(1)), batch(2, 5, 6)) == []


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


class Average(nn.Module):
    """Scales by a moving average that it updates, so that its backward depends on the buffer."""

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
def test_a_buffer_read_and_written_under_recompute(name: str, chunks: int) -> None:
    check_step(STATEFUL[name](), batch(), chunks)


@pytest.mark.parametrize("name", ["average", "spectral norm"])
def test_a_buffer_read_and_written_without_rule_is_wrong(name: str) -> None:
    layers, x, one = list(STATEFUL[name]()), batch().requires_grad_(), torch.ones(8, 6)
    joint = traced(*layers, x=x)
    before = run_joint(joint, layers, x, one)
    with torch.no_grad():
        for index, buffer in enumerate(buffers_of(layers)):
            buffer.copy_(before[Role.BUFFER, index])
    after = run_joint(joint, layers, x, one)
    gradients = [key for key in before if key[0] is Role.PARAMETER_GRADIENT]
    assert not all(torch.equal(before[key], after[key]) for key in gradients)


def test_a_failure_in_a_later_stage_leaves_buffers_as_they_were() -> None:
    class Index(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x[:, 0] * 1e6).long().abs()

    model = nn.Sequential(nn.BatchNorm1d(6), Index(), nn.Embedding(3, 2))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises((IndexError, RuntimeError), match="index out of range"):
        GPipe(model, [1, 1, 1], chunks=4)(batch())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class Replacing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.ema = self.ema * 0.9 + x.detach().mean(0) * 0.1
        return x - self.ema


def test_a_replaced_buffer_is_refused() -> None:
    layer = Replacing()
    held = layer.ema
    assert "ema" in refused(layer, x=batch())
    assert layer.ema is held


def test_a_replaced_buffer_without_rule_is_never_updated() -> None:
    layer = Replacing()
    with mock.patch.object(trace, "_tensors", return_value={}):
        joint = traced(layer, x=batch())
    assert Role.BUFFER not in {port.role for port, _ in joint.outputs}


# Layers that trace into something else


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_are_refused(kind: type[nn.RNNBase]) -> None:
    assert "recurrent" in refused(kind(6, 6), x=batch(5, 6))


class States(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = kind(6, 6, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.layer(x)[0]
        return states


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_without_rule_are_wrong(kind: type[nn.RNNBase]) -> None:
    # Three rules stand in the way, one of them by chance: the layer's list of its weights changes in a trace.
    with (
        mock.patch.object(trace, "refuse_layers", return_value=None),
        mock.patch.object(trace, "snapshot", return_value=list),
        mock.patch.object(aot, "without_python_decompositions", contextlib.nullcontext),
    ):
        assert "output" in differences(nn.Sequential(States(kind)), batch(5, 6))


UPSAMPLING = {"bilinear": (3, 5, 4), "bicubic": (3, 5, 4), "trilinear": (2, 3, 4, 3)}


@pytest.mark.parametrize("mode", UPSAMPLING)
def test_upsampling(mode: str) -> None:
    check_step(nn.Sequential(nn.Upsample(scale_factor=1.7, mode=mode)), batch(*UPSAMPLING[mode]))


@pytest.mark.parametrize("mode", UPSAMPLING)
def test_upsampling_without_rule_is_wrong(mode: str) -> None:
    model = nn.Sequential(nn.Upsample(scale_factor=1.7, mode=mode))
    with mock.patch.object(aot, "without_python_decompositions", contextlib.nullcontext):
        assert differences(model, batch(*UPSAMPLING[mode])) != []


def test_a_changed_parameter_is_refused() -> None:
    indices = torch.arange(6).expand(8, 6)
    assert "max_norm" in refused(nn.Embedding(6, 4, max_norm=0.5), x=indices)


def test_a_changed_parameter_without_rule_is_refused_by_its_trace() -> None:
    # Today the trace has the change of a parameter as a result of its own, for which there is no port.
    indices = torch.arange(6).expand(8, 6)
    with mock.patch.object(trace, "refuse_layers", return_value=None):
        assert refused(nn.Embedding(6, 4, max_norm=0.5), x=indices)


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
    with mock.patch.object(aot, "_uncached_autocast", contextlib.nullcontext):
        assert differences(nn.Sequential(Twice()), batch()) != []
        ours = pipeline_step(GPipe(nn.Sequential(Twice()), [1], chunks=4), batch(), 0.0)
    assert unequal(ours, expected) == []


# Constants


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.linspace(0, 1, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, [0, 2, 4, 1, 3, 5]] * torch.tensor(2.0) + self.plain


def test_constants() -> None:
    check_step(nn.Sequential(linear(), Constants()), batch())


def test_constants_without_rule_fail_to_trace() -> None:
    with mock.patch.object(aot, "tracing", return_value=contextlib.nullcontext()):
        assert "tracing raised" in refused(Constants(), x=batch())


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Parameter(torch.ones(6))]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.hidden[0]


def test_a_parameter_that_is_no_parameter_is_refused() -> None:
    assert "needs a gradient" in refused(Hidden(), x=batch())


def test_a_parameter_that_is_no_parameter_without_rule_gets_no_gradient() -> None:
    layer = Hidden()
    with mock.patch.object(trace, "refuse_graph", return_value=None):
        GPipe(nn.Sequential(linear(), layer), [2])(batch()).sum().backward()
    assert layer.hidden[0].grad is None


# Side effects


class Remembering(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return x * 2


def test_side_effects_are_refused() -> None:
    layer = Remembering()
    assert "last" in refused(layer, x=batch())
    assert not hasattr(layer, "last")


def test_side_effects_without_rule_leave_tracing_tensors_behind() -> None:
    layer = Remembering()
    with mock.patch.object(trace, "snapshot", return_value=list):
        traced(layer, x=batch())
    assert type(layer.last) is not Tensor


def test_hooks_are_refused() -> None:
    layer = linear()
    layer.register_forward_hook(lambda *_: None)
    assert "hook" in refused(layer, x=batch())


def test_hooks_without_rule_run_while_tracing_alone() -> None:
    calls: list[object] = []
    layer = linear()
    layer.register_forward_hook(lambda *args: calls.append(None))
    with mock.patch.object(refuse, "_hooks", return_value=[]):
        pipe = GPipe(nn.Sequential(layer), [1])
        pipe(batch())
        traces = len(calls)
        pipe(batch())
    assert len(calls) == traces


# Changes after the first call


def _set_dropout(model: nn.Sequential) -> None:
    model[1].p = 0.9


def _replace(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().double().float() * 2)


def _freeze(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(False)


def _unfreeze(model: nn.Sequential) -> None:
    model[2].requires_grad_(True)


CHANGES = {"attribute": _set_dropout, "replaced": _replace, "frozen": _freeze, "unfrozen": _unfreeze}


def changeable() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Dropout(0.1), linear(1).requires_grad_(False))


@pytest.mark.parametrize("name", CHANGES)
def test_changes_after_the_first_call(name: str) -> None:
    model = changeable()
    pipe = GPipe(model, [3], chunks=4)
    pipeline_step(pipe, batch(), 0.0)
    CHANGES[name](model)
    assert unequal(pipeline_step(pipe, batch(), 0.0), loop_step(model, batch(), 4)) == []


@pytest.mark.parametrize("name", ["attribute", "unfrozen"])  # a frozen one loses its gradient in any case
def test_changes_after_the_first_call_without_rule_are_missed(name: str) -> None:
    model = changeable()
    pipe = GPipe(model, [3], chunks=4)
    with (
        mock.patch.object(gpipe_fast.gpipe, "fingerprint", return_value=None),
        mock.patch.object(gpipe_fast.compile, "fingerprint", return_value=None),
    ):
        pipeline_step(pipe, batch(), 0.0)
        CHANGES[name](model)
        assert unequal(pipeline_step(pipe, batch(), 0.0), loop_step(model, batch(), 4)) != []


# Out variants that write more than their result


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


class Sampling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.distributions.Normal(x, 1.0).rsample()


@pytest.mark.parametrize("kind", [Branch, Reentrant, Masked, Sampling])
def test_what_cannot_be_traced_says_so(kind: type[nn.Module]) -> None:
    layer = kind()
    x = leaf(batch())
    assert "tracing raised" in refused(nn.Tanh(), layer, x=x)
    # A reentrant checkpoint fails only in the backward, which belongs to no layer.
    where = "use_reentrant" if kind is Reentrant else rf"layer 1 \({kind.__name__}\)"
    with pytest.raises(RuntimeError, match=where):
        GPipe(nn.Sequential(nn.Tanh(), layer), [2])(x)

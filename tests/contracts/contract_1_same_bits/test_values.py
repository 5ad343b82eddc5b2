"""Tuples and nested values as inputs, outputs and between layers; losses of some of the outputs."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gpipe_fast import GPipe, replicate
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.layers.structure import Replicated
from tests.contracts.contract_1_same_bits.equality import PlainLoop
from tests.internals import num_plans
from tests.reference import SEED, check_step, restored
from tests.untraceable import FunctionLayer

pytestmark = pytest.mark.usefixtures("one_thread")

Pair = namedtuple("Pair", ["first", "second"])


def function_layer(function: Callable[..., Any]) -> FunctionLayer:
    return FunctionLayer(function, nn.Linear(6, 6))


def nested(f: nn.Module, x: Tensor) -> Any:
    return (x, [f(x), (x * 2,)], Pair(x.tanh(), OrderedDict(a=x + 1, b=True)))


def from_nested(f: nn.Module, value: Any) -> Tensor:
    x, (y, (z,)), pair = value
    assert isinstance(pair, Pair)
    assert isinstance(pair.second, OrderedDict)
    assert pair.second["b"] is True
    return f(x) + y * z + pair.first * pair.second["a"]


def with_replicated(f: nn.Module, x: Tensor, rest: tuple[Tensor, Tensor]) -> Tensor:
    weight, mask = rest
    return (f(x) @ weight) * mask


class TensorToPair(nn.Module):
    """Maps a tensor to two float tensors, with an integer tensor between them if `integers`."""

    def __init__(self, integers: bool = False) -> None:
        super().__init__()
        self.linear, self.integers = nn.Linear(6, 12), integers

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a, b = self.linear(x).chunk(2, 1)
        return (a, b.argmax(1), b.tanh()) if self.integers else (a, b.tanh())


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def features(batch: int = 8, seed: int = 1, requires_grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 6, generator=generator).requires_grad_(requires_grad)


def make_weight() -> Tensor:
    return features(6, seed=5)


def _nested_input() -> Any:
    x = features()
    return (x, [features(seed=2), (features(seed=3),)], Pair(x, OrderedDict(a=features(seed=4), b=True)))


# The functions of two layers, and the arguments.
ARGUMENTS: dict[str, tuple[list[Callable[..., Any]], Callable[[], tuple[Any, ...]]]] = {
    "named tuples between": ([nested, from_nested], lambda: (features(),)),
    "named tuples in and out": ([from_nested, nested], lambda: (_nested_input(),)),
    "tuples of one": ([lambda f, x: (f(x[0]),)] * 2, lambda: ((features(),),)),
    "outputs of different batch sizes": (
        [lambda f, x: f(x), lambda f, x: (x.repeat_interleave(2, 0) * 3, x.sum(1))],
        lambda: (features(),),
    ),
    "replicated tuple": (
        [with_replicated, lambda f, x: f(x)],
        lambda: (features(), replicate((make_weight(), torch.arange(6)))),
    ),
}


def layers_and_arguments(name: str) -> tuple[list[nn.Module], tuple[Any, ...]]:
    functions, make_arguments = ARGUMENTS[name]
    return [function_layer(function) for function in functions], make_arguments()


def tensors(value: Any) -> list[Tensor]:
    leaves = tree_leaves(value, is_leaf=lambda v: isinstance(v, Replicated))
    leaves = tree_leaves([v.value if isinstance(v, Replicated) else v for v in leaves])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def without_tensors(value: Any) -> str:
    return str(tree_map(lambda v: ... if isinstance(v, Tensor) else v, value))


def both_of(layers: Sequence[nn.Module], balance: list[int], **options: Any) -> tuple[PlainLoop, GPipe]:
    """Returns the plain loop and a pipeline of the same layers."""
    loop, pipe = PlainLoop(*layers), GPipe(nn.Sequential(*layers), balance, chunks=3, **options)
    loop.chunks = 3
    return loop, pipe


def step(model: nn.Module, args: Any, used: Sequence[int] | None = None) -> list[Tensor | None]:
    """Returns outputs, gradients and buffers of a step whose loss uses the outputs at indices ``used``."""
    inputs = tensors(args)
    with restored(model):
        for x in inputs:
            x.grad = None
        torch.manual_seed(SEED)
        outputs = tensors(model(*args))
        differentiable = [o for o in outputs if o.requires_grad]
        chosen = differentiable if used is None else [differentiable[i] for i in used]
        torch.stack([((i + 1) * o.square()).sum() for i, o in enumerate(chosen)]).sum().backward()
        gradients = [t.grad for t in (*inputs, *model.parameters())]
        copies = [None if g is None else g.clone() for g in gradients]
        return [*(o.detach() for o in outputs), *copies, *(b.clone() for b in model.buffers())]


def all_equal(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in pairs)


@pytest.mark.smoke
@pytest.mark.sampled(10)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_model_equals_the_plain_loop(name: str, checkpoint: str) -> None:
    torch.manual_seed(0)
    layers, args = layers_and_arguments(name)
    loop, pipe = both_of(layers, [1, 1], checkpoint=checkpoint)
    assert all_equal(step(pipe, args), step(loop, args))
    with torch.no_grad():
        ours, expected = pipe.eval()(*args), loop(*args)
    assert without_tensors(ours) == without_tensors(expected)
    assert all_equal(tensors(ours), tensors(expected))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("make_last", [lambda: TensorToPair(integers=True), TwoHeads])
def test_an_output_without_a_gradient_equals_the_plain_loop(
    checkpoint: str, make_last: Callable[[], nn.Module]
) -> None:
    """A forward expects the gradients of the previous step; any other combination must be handled, too."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), make_last()]
    (loop, pipe), args = both_of(layers, [2, 2], checkpoint=checkpoint), (features(),)
    for used in ((0, 1), (0,), (0,), (1,), (0, 1), (1, 0), (0,)):
        assert all_equal(step(pipe, args, used), step(loop, args, used)), used


def test_outputs_may_be_differentiated_separately() -> None:
    torch.manual_seed(0)
    found = []
    for model in both_of([nn.Linear(6, 6), TwoHeads()], [1, 1]):
        outputs, parameters = model(features()), list(model[0].parameters())
        first = torch.autograd.grad(outputs[0].sum(), parameters, retain_graph=True)
        second = torch.autograd.grad(outputs[1].square().sum(), parameters)
        found.append([*first, *second])
    assert all(map(torch.equal, *found))


def test_a_changed_constant_is_traced_again() -> None:
    """Constants that compare equal but differ are distinguished: 1 and True, 0.0 and -0.0."""
    model = nn.Sequential(function_layer(lambda f, x, c: f(x) * (1 if c is True else c)), nn.Identity())
    pipe, x = GPipe(model, [1, 1], chunks=2), features()
    for constant in (1.0, True, 2, 0.0, -0.0, 1, float("nan"), 2):
        expected = torch.cat([model[0](part, constant) for part in x.chunk(2)])
        actual = pipe(x, constant)
        assert torch.equal(actual.view(torch.int32), expected.view(torch.int32)) or constant != constant
    assert num_plans(pipe) == 7


EXPANDED: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "bias": lambda f, x: f.bias.expand(x.shape),
    "weight, with a dimension in front": lambda f, x: f.weight[None].expand(len(x), -1, -1),
    "part of a transposed weight": lambda f, x: f.weight.t()[1:2, ::2].expand(len(x), 3),
    "constant": lambda f, x: torch.ones(1, 6).expand(x.shape),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_expanded_parameters_pass_between_stages_and_leave_the_last(name: str) -> None:
    """They must not be aliased, and a copy has the strides of the trace, of which some are 0."""

    def make(f: nn.Module, x: Tensor) -> Any:
        assert isinstance(f, nn.Linear)
        return f(x), EXPANDED[name](f, x)

    def use(f: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        out: Tensor = f(pair[0]) * pair[1].reshape(len(pair[0]), -1)[:, :1]
        return out

    torch.manual_seed(SEED)
    model = nn.Sequential(function_layer(make), function_layer(use))
    check_step(model, torch.randn(7, 6), balance=[1, 1])
    last = GPipe(model[:1], balance=[1], devices=["cpu"], chunks=2, backend="aten")
    x = torch.randn(8, 6)
    halves = zip(*map(model[0], x.chunk(2)), strict=True)  # a product of all rows may round differently
    for ours, expected in zip(last(x), map(torch.cat, halves), strict=True):
        assert torch.equal(ours, expected)


def test_an_expanded_buffer_is_not_shared_with_the_caller() -> None:
    norm = nn.BatchNorm1d(6)
    model = nn.Sequential(FunctionLayer(lambda f, x: (f(x), f.running_mean.expand(x.shape)), norm))
    pipe = GPipe(model, balance=[1], devices=["cpu"], chunks=1, backend="aten").eval()
    _, means = pipe(torch.randn(8, 6) + 3)
    assert norm.running_mean is not None
    norm.running_mean.fill_(7.0)
    assert torch.equal(means, torch.zeros(8, 6))


# Losses of an output and of positive numbers or signs.
_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{name: getattr(F, name) for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "poisson_nll_loss")},
    **{name: getattr(F, name) for name in ("soft_margin_loss", "hinge_embedding_loss")},
}
_FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", _LOSSES)
@pytest.mark.parametrize("dtype", _FLOATS)
@pytest.mark.parametrize("dtype_of_target", _FLOATS)
def test_a_loss_of_tensors_of_two_dtypes(name: str, dtype: torch.dtype, dtype_of_target: torch.dtype) -> None:
    """Fake kernels return the wider of the dtypes, where some real ones return that of the output."""

    def loss(f: nn.Module, x: Tensor) -> Tensor:
        target = torch.linspace(0, 1, x.numel(), dtype=dtype_of_target).view_as(x)
        return _LOSSES[name](f(x), target if "in" not in name else target.sub(0.5).sign()).reshape(1)

    model = nn.Sequential(nn.Linear(6, 6), function_layer(loss)).to(dtype)
    check_step(model, torch.randn(8, 6, dtype=dtype), budgets=(0.0, 1.0))

"""Tuples and nested values as inputs, outputs and between layers; losses of some of the outputs."""

from __future__ import annotations

import gc
import re
import reprlib
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gpipe_fast import GPipe, replicate, verify
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.layers.structure import Replicated
from tests.contracts.contract_1_same_bits.equality import PlainLoop
from tests.internals import num_plans
from tests.reference import SEED, restored

pytestmark = pytest.mark.usefixtures("one_thread")

Pair = namedtuple("Pair", ["first", "second"])


class FunctionLayer(nn.Module):
    """A layer that calls a function with a linear layer and the inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.linear, *args, **kwargs)


def as_dict(f: nn.Module, x: Tensor) -> dict[str, Any]:
    """Returns float, bool, integer and detached tensors, beside numbers, a string and None."""
    h = f(x)
    return {
        "h": h,
        "mask": h > 0,
        "which": [h.argmax(1), h.detach()],
        "scale": 0.5,
        "how": "twice",
        "no": None,
    }


def from_dict(f: nn.Module, value: dict[str, Any]) -> Tensor:
    assert (value["scale"], value["how"], value["no"]) == (0.5, "twice", None)
    index, constant = value["which"]
    h = torch.where(value["mask"], f(value["h"]), constant) * value["scale"]
    return h + index.unsqueeze(1)


def nested(f: nn.Module, x: Tensor) -> Any:
    return (x, [f(x), (x * 2,)], Pair(x.tanh(), OrderedDict(a=x + 1, b=True)))


def from_nested(f: nn.Module, value: Any) -> Tensor:
    x, (y, (z,)), pair = value
    assert isinstance(pair, Pair)
    assert isinstance(pair.second, OrderedDict)
    assert pair.second["b"] is True
    return f(x) + y * z + pair.first * pair.second["a"]


def input_and_views(f: nn.Module, x: Tensor) -> Any:
    """Returns the input, views of it, and one result twice."""
    h = f(x)
    return [x, x[:, :3], x.view(-1, 2, 3), h, h, h.t().t()]


def from_input_and_views(f: nn.Module, value: list[Tensor]) -> dict[str, Any]:
    a, b, c, d, e, g = value
    return {"sum": f(a) + b.repeat(1, 2) + c.flatten(1), "more": (d * e, g), "count": 6, "nothing": None}


def keywords(f: nn.Module, x: Tensor, *, bias: Tensor, factor: float = 1.0, flags: Any = ()) -> Tensor:
    return f(x) * factor + bias if "plus" in flags else f(x) * factor - bias


def with_replicated(f: nn.Module, x: Tensor, weight: Tensor, mask: Tensor | None = None) -> Tensor:
    h = f(x) @ weight
    return h if mask is None else h * mask


class PairToPair(nn.Module):
    """Maps a pair to a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = pair
        return self.norm(self.a(x) + y), torch.tanh(self.b(y))


class TensorToPair(nn.Module):
    """Maps a tensor to two float tensors, with an integer tensor between them if `integers`."""

    def __init__(self, integers: bool = False) -> None:
        super().__init__()
        self.linear, self.integers = nn.Linear(6, 12), integers

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a, b = self.linear(x).chunk(2, 1)
        return (a, b.argmax(1), b.tanh()) if self.integers else (a, b.tanh())


class PairToTensor(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * 2 + pair[1]


class TupleOfOne(nn.Module):
    """Maps a tuple of one tensor to a tuple of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, single: tuple[Tensor]) -> tuple[Tensor]:
        (x,) = single
        return (self.linear(x),)


class UnequalBatchSizes(nn.Module):
    """Returns two rows per sample, and one row per sample."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.repeat_interleave(2, 0) * 3, x.sum(1)


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


ARGUMENTS: dict[
    str, tuple[list[Callable[..., Any]], Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]
] = {
    "a dict between": ([as_dict, from_dict], lambda: ((features(),), {})),
    "nested between": ([nested, from_nested], lambda: ((features(),), {})),
    "input and views": ([input_and_views, from_input_and_views], lambda: ((features(),), {})),
    "nested out": ([lambda f, x: f(x), nested], lambda: ((features(),), {})),
    "nested in": ([from_nested, as_dict], lambda: ((_nested_input(),), {})),
    "keywords": (
        [keywords, lambda f, x: f(x)],
        lambda: ((features(),), {"bias": features(seed=2), "factor": 1.5, "flags": ("plus", None)}),
    ),
    "several arguments": (
        [with_replicated, lambda f, x: f(x)],
        lambda: ((features(), replicate(make_weight())), {}),
    ),
    "replicated in a dict": (
        [lambda f, v: with_replicated(f, v["x"], v["w"], v["mask"]), lambda f, x: f(x)],
        lambda: (
            ({"x": features(), "w": replicate(make_weight()), "mask": replicate(torch.tensor(2.0))},),
            {},
        ),
    ),
    "replicated whole": (
        [lambda f, x, rest: with_replicated(f, x, *rest), lambda f, x: f(x)],
        lambda: ((features(), replicate((make_weight(), torch.arange(6)))), {}),
    ),
}


TUPLES: dict[str, tuple[Callable[[], list[nn.Module]], list[int], int]] = {
    "pair in, pair out": (lambda: [PairToPair(), nn.Identity(), PairToPair()], [1, 2], 2),
    "pair in, tensor out": (lambda: [PairToPair(), PairToTensor(), nn.Linear(6, 3)], [1, 1, 1], 2),
    "tensor in, pair out": (lambda: [nn.Linear(6, 6), nn.Dropout(0.3), TensorToPair()], [1, 2], 1),
    "integers among the outputs": (lambda: [nn.Linear(6, 6), TensorToPair(integers=True)], [1, 1], 1),
    "tuples of one": (lambda: [TupleOfOne(), TupleOfOne()], [1, 1], -1),
    "outputs of different batch sizes": (lambda: [nn.Linear(6, 6), UnequalBatchSizes()], [1, 1], 1),
}


def _nested_input() -> Any:
    x = features()
    return (x, [features(seed=2), (features(seed=3),)], Pair(x, OrderedDict(a=features(seed=4), b=True)))


def without_replicate(value: Any) -> Any:
    return tree_map(
        lambda v: v.value if isinstance(v, Replicated) else v,
        value,
        is_leaf=lambda v: isinstance(v, Replicated),
    )


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def without_tensors(value: Any) -> str:
    return str(tree_map(lambda v: ... if isinstance(v, Tensor) else v, value))


def both_of(layers: Sequence[nn.Module], balance: list[int], **options: Any) -> tuple[PlainLoop, GPipe]:
    """Returns the plain loop and a pipeline of the same layers."""
    loop, pipe = PlainLoop(*layers), GPipe(nn.Sequential(*layers), balance, chunks=3, **options)
    loop.chunks = 3
    return loop, pipe


def step(
    model: nn.Module, args: Any, kwargs: Any = None, used: Sequence[int] | None = None
) -> list[Tensor | None]:
    """Returns outputs, gradients and buffers of a step whose loss uses the outputs at indices ``used``."""
    kwargs = kwargs or {}
    inputs = tensors(without_replicate((args, kwargs)))
    with restored(model):
        for x in inputs:
            x.grad = None
        torch.manual_seed(SEED)
        outputs = tensors(model(*args, **kwargs))
        differentiable = [o for o in outputs if o.requires_grad]
        chosen = differentiable if used is None else [differentiable[i] for i in used]
        torch.stack([((i + 1) * o.square()).sum() for i, o in enumerate(chosen)]).sum().backward()
        gradients = [t.grad for t in (*inputs, *model.parameters())]
        copies = [None if g is None else g.clone() for g in gradients]
        return [*(o.detach() for o in outputs), *copies, *(b.clone() for b in model.buffers())]


def all_equal(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in pairs)


CASES: dict[str, Callable[[], tuple[list[nn.Module], list[int], tuple[Any, ...], dict[str, Any]]]] = {
    name: lambda functions=functions, arguments=arguments: (
        [FunctionLayer(function) for function in functions],
        [1, 1],
        *arguments(),
    )
    for name, (functions, arguments) in ARGUMENTS.items()
}
CASES |= {
    name: lambda make=make, balance=balance, arity=arity: (
        make(),
        balance,
        (features(),) if arity == 1 else (tuple(features(8, seed) for seed in range(abs(arity))),),
        {},
    )
    for name, (make, balance, arity) in TUPLES.items()
}


@pytest.mark.smoke
@pytest.mark.sampled(18)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("name", CASES)
def test_a_model_equals_the_plain_loop(name: str, checkpoint: str) -> None:
    torch.manual_seed(0)
    layers, balance, args, kwargs = CASES[name]()
    loop, pipe = both_of(layers, balance, checkpoint=checkpoint)
    assert all_equal(step(pipe, args, kwargs), step(loop, args, kwargs))
    with torch.no_grad():
        ours, expected = pipe.eval()(*args, **kwargs), loop(*args, **kwargs)
    assert without_tensors(ours) == without_tensors(expected)
    assert all_equal(tensors(ours), tensors(expected))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("integers", [False, True])
def test_an_output_without_a_gradient_equals_the_plain_loop(checkpoint: str, integers: bool) -> None:
    """A forward expects the gradients of the previous step; any other combination must be handled, too."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), TensorToPair(integers)]
    (loop, pipe), args = both_of(layers, [2, 2], checkpoint=checkpoint), (features(),)
    for used in ((0, 1), (0,), (0,), (1,), (0, 1), (1, 0), (0,)):
        assert all_equal(step(pipe, args, used=used), step(loop, args, used=used)), used


def test_a_head_that_the_loss_does_not_use_has_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(6, 6), TwoHeads())
    pipe = GPipe(model, [1, 1], chunks=2, checkpoint="never")
    for _ in range(2):  # the missing gradient is first unexpected, then expected
        model.zero_grad()
        pipe(features())[0].sum().backward()
        assert model[1].first.weight.grad is not None
        assert model[1].second.weight.grad is None


def test_outputs_may_be_differentiated_separately() -> None:
    torch.manual_seed(0)
    found = []
    for model in both_of([nn.Linear(6, 6), TwoHeads()], [1, 1]):
        outputs, parameters = model(features()), list(model[0].parameters())
        first = torch.autograd.grad(outputs[0].sum(), parameters, retain_graph=True)
        second = torch.autograd.grad(outputs[1].square().sum(), parameters)
        found.append([*first, *second])
    assert all(map(torch.equal, *found))


def test_a_backward_traced_later_uses_the_autocast_mode_of_its_forward() -> None:
    torch.manual_seed(0)
    x, found = features(), []
    for model in both_of([nn.Linear(6, 6), TwoHeads()], [1, 1]):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            outputs = model(x)
        found.append(torch.autograd.grad(outputs[0].float().square().sum(), [x, *model[0].parameters()]))
    assert all(map(torch.equal, *found))


def test_a_change_of_the_module_before_an_unexpected_backward_is_rejected() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), TwoHeads())
    outputs = GPipe(model, [1, 2], chunks=2)(features())
    model[1].p = 0.9
    with pytest.raises(RuntimeError, match="module was changed between forward and backward"):
        outputs[0].sum().backward()


def test_inputs_that_need_no_gradient_get_none() -> None:
    model = nn.Sequential(PairToPair())
    x, y = features(), features(seed=2, requires_grad=False)
    GPipe(model, [1], chunks=2)((x, y))[0].sum().backward()
    assert x.grad is not None
    assert y.grad is None


def test_a_changed_constant_is_traced_again() -> None:
    """Constants that compare equal but differ are distinguished: 1 and True, 0.0 and -0.0."""
    model = nn.Sequential(FunctionLayer(lambda f, x, c: f(x) * (1 if c is True else c)), nn.Identity())
    pipe, x = GPipe(model, [1, 1], chunks=2), features()
    for constant in (1.0, True, 2, 0.0, -0.0, 1, float("nan"), 2):
        expected = torch.cat([model[0](part, constant) for part in x.chunk(2)])
        actual = pipe(x, constant)
        assert torch.equal(actual.view(torch.int32), expected.view(torch.int32)) or constant != constant
    assert num_plans(pipe) == 7


def test_verify_accepts_nested_values() -> None:
    torch.manual_seed(0)
    model = GPipe(nn.Sequential(FunctionLayer(from_nested), FunctionLayer(as_dict)), [1, 1], chunks=4)
    report = verify(model, _nested_input(), lambda out: out["h"].square().sum())
    assert report, report
    assert "gradient of input 4" in report.table(all=True)


class Batched(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x * 2, len(x)


ERRORS: dict[str, tuple[type[Exception], str, Callable[[GPipe], object]]] = {
    "an object": (
        TypeError,
        "expected Tensor, but got object; tensors may be",
        lambda m: m(object()),
    ),
    "a set": (TypeError, "expected Tensor, but got set", lambda m: m({1})),
    "nothing": (TypeError, "expected Tensor, but got tuple", lambda m: m(())),
    "no tensor": (TypeError, "expected Tensor, but got list", lambda m: m([3, None])),
    "all replicated": (
        ValueError,
        "all tensors are replicated",
        lambda m: m(replicate(features())),
    ),
    "no dimension": (
        ValueError,
        r"got a 0-dimensional tensor; wrap it in gpipe_fast.replicate\(",
        lambda m: m((features(), torch.tensor(1.0))),
    ),
    "batch sizes": (
        ValueError,
        r"got \[8, 6\], \[3, 6\]; wrap inputs that every micro-batch needs whole in gpipe_fast.replicate\(",
        lambda m: m({"x": features(8), "y": features(3)}),
    ),
}


@pytest.mark.parametrize(("kind", "message", "call"), ERRORS.values(), ids=ERRORS.keys())
def test_invalid_inputs_are_rejected(
    kind: type[Exception], message: str, call: Callable[[GPipe], object]
) -> None:
    with pytest.raises(kind, match=message):
        call(GPipe(nn.Sequential(FunctionLayer(as_dict)), [1], chunks=2))


class ScalarOutput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def test_a_0_dimensional_output_is_rejected() -> None:
    with pytest.raises(RuntimeError, match="output 0 of the last layer is 0-dimensional"):
        GPipe(nn.Sequential(nn.Linear(6, 6), ScalarOutput()), [1, 1], chunks=2)(features())


def test_a_pipeline_with_several_outputs_is_garbage_collected() -> None:
    """The plan refers through C++ to a callback that makes plans; the garbage collector cannot see that."""
    pipe = GPipe(nn.Sequential(nn.Linear(6, 6), TwoHeads()), [1, 1], chunks=2)
    pipe(features())[0].sum().backward()
    reference = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert reference() is None


def test_a_constant_that_differs_between_micro_batches_is_rejected() -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(6, 6), Batched()), [1, 1], chunks=2)
    assert pipe(features(8))[1] == 4
    with pytest.raises(RuntimeError, match=r"differs between micro-batches.*\(\.\.\., 4\) and \(\.\.\., 3\)"):
        pipe(features(7))


def test_an_error_names_the_layer_that_returns_an_unsupported_type() -> None:
    class Set(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {x}

    message = r"stage 0.*cannot be passed on.*but got set"
    for backend in ("auto", "aten", "eager"):
        with pytest.raises(TypeError, match=message):
            GPipe(nn.Sequential(Set(), nn.Identity()), [1, 1], chunks=2, backend=backend)(features())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("backend", ["auto", "aten", "eager"])
@pytest.mark.parametrize(
    "value", [None, True, 3, 2.5, "text", (), [], {"a": None, "b": [1]}, "x" * 1000], ids=reprlib.repr
)
def test_a_model_output_without_a_tensor_is_rejected(value: object, backend: str) -> None:
    """Such a value may cross stages, but the model's output needs a tensor to concatenate."""
    returning, ignoring = FunctionLayer(lambda f, x: value), FunctionLayer(lambda f, _: torch.ones(4, 6))
    pipe = GPipe(nn.Sequential(returning, ignoring), [1, 1], chunks=2, backend=backend)
    assert pipe(features()).shape == (8, 6)
    pipe = GPipe(nn.Sequential(nn.Identity(), returning), [1, 1], chunks=2, backend=backend)
    message = (
        f"expected Tensor, but the last layer returned {reprlib.repr(value)} of type {type(value).__name__}, "
        "which contains no tensor to concatenate; return a tensor, or tuples, lists and dicts of tensors, "
        "which may also contain None, bools, numbers and strings"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        pipe(features())

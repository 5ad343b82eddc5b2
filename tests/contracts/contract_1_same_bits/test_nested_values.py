"""Nested values as inputs, outputs and between layers, against the plain micro-batch loop."""

from __future__ import annotations

import re
import reprlib
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gpipe_fast import GPipe, replicate, verify
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.layers.structure import Replicated
from tests.internals import num_plans
from tests.reference import restored

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


def features(batch: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(batch, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()


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


def _nested_input() -> Any:
    x = features()
    return (x, [features(seed=2), (features(seed=3),)], Pair(x, OrderedDict(a=features(seed=4), b=True)))


def without_replicate(value: Any) -> Any:
    return tree_map(
        lambda v: v.value if isinstance(v, Replicated) else v,
        value,
        is_leaf=lambda v: isinstance(v, Replicated),
    )


def loop(model: nn.Sequential, value: Any, chunks: int) -> Any:
    """Runs the plain loop without keyed random numbers; a Sequential would not accept several arguments."""

    def run_micro_batch(m: int) -> Any:
        def chunk_of(v: Any) -> Any:
            if isinstance(v, Replicated):
                return v.value
            return v.chunk(chunks)[m] if isinstance(v, Tensor) else v

        args, kwargs = tree_map(chunk_of, value, is_leaf=lambda v: isinstance(v, Replicated))
        return model[1:](model[0](*args, **kwargs))

    num_micro_batches = len(next(v for v in tree_leaves(value) if isinstance(v, Tensor)).chunk(chunks))
    outputs = [run_micro_batch(m) for m in range(num_micro_batches)]
    return tree_map(
        lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *outputs
    )


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def step(model: nn.Module, output: Callable[[], Any], inputs: list[Tensor]) -> list[Tensor | None]:
    """Runs one step and returns outputs and gradients."""
    with restored(model):
        for x in inputs:
            x.grad = None
        outputs = tensors(output())
        losses = [((i + 1) * o.square()).sum() for i, o in enumerate(outputs) if o.requires_grad]
        torch.stack(losses).sum().backward()
        gradients = [t.grad for t in (*inputs, *model.parameters())]
        return [*(o.detach() for o in outputs), *(None if g is None else g.clone() for g in gradients)]


def all_equal(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.smoke
@pytest.mark.parametrize(
    "checkpoint",
    [c if c == "except_last" else pytest.param(c, marks=pytest.mark.extended) for c in CHECKPOINT_MODES],
)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_nested_values_equal_the_plain_loop(name: str, checkpoint: str) -> None:
    functions, arguments = ARGUMENTS[name]
    torch.manual_seed(0)
    model = nn.Sequential(*(FunctionLayer(function) for function in functions))
    args, kwargs = arguments()
    inputs = tensors(without_replicate((args, kwargs)))
    pipe = GPipe(model, [1, 1], chunks=3, checkpoint=checkpoint)
    expected = step(model, lambda: loop(model, (args, kwargs), 3), inputs)
    assert all_equal(step(pipe, lambda: pipe(*args, **kwargs), inputs), expected)
    with torch.no_grad():
        ours, expected_output = pipe.eval()(*args, **kwargs), loop(model, (args, kwargs), 3)
    assert str(tree_map(lambda v: ... if isinstance(v, Tensor) else v, ours)) == str(
        tree_map(lambda v: ... if isinstance(v, Tensor) else v, expected_output)
    )
    assert all(map(torch.equal, tensors(ours), tensors(expected_output)))


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

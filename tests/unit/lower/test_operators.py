"""Out variants of operators: which operators have one, and that it gives the same bits and strides."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torchgen
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only

from gpipe_fast.lower.operators import (
    FAITHFUL_OUT_VARIANTS,
    OperatorCall,
    functional_call,
    is_pointwise,
    out_call,
)
from gpipe_fast.trace.fake import RealLayouts
from tests.layouts import DTYPES, draw_shape, draw_tensor, same_bits
from tests.sampling import seed

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten
T = TypeVar("T")
FLOATING = [dtype for dtype in DTYPES if dtype.is_floating_point]
CASES_OF_OPERATOR = 20


def make_node(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Returns a graph node whose arguments are tensors instead of nodes."""
    return fx.Graph().call_function(op, args, kwargs)


def execute(chosen: OperatorCall, outs: list[Tensor]) -> None:
    arguments = list(chosen.arguments)
    assert chosen.out_positions is not None
    for position, out in zip(chosen.out_positions, outs, strict=True):
        assert arguments[position] is None
        arguments[position] = out
    schema = chosen.op._schema.arguments
    chosen.op(
        *(a for a, s in zip(arguments, schema, strict=True) if not s.kwarg_only),
        **{s.name: a for a, s in zip(arguments, schema, strict=True) if s.kwarg_only},
    )


X = torch.linspace(-2, 2, 12).view(3, 4)


def test_the_out_variant_of_relu_keeps_the_bits_of_special_values() -> None:
    edges = torch.tensor([float("nan"), -float("nan"), -0.0, 0.0, float("inf"), -float("inf"), 1e-45, -1e-45])
    chosen = out_call(make_node(aten.relu.default, edges))
    assert chosen is not None
    out = torch.empty_like(edges)
    execute(chosen, [out])
    assert torch.equal(out.view(torch.int32), torch.relu(edges).view(torch.int32))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        # Their generated out variants compute into a temporary and copy it.
        (aten.native_layer_norm.default, (X, [4], None, None, 1e-5)),
        (aten.embedding.default, (X, torch.tensor([0]))),
        (aten.convolution.default, (X[None], X[:, :, None], None, [1], [0], [1], False, [0], 1)),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_operators_without_a_real_out_variant_return_their_results(op: Any, args: tuple[Any, ...]) -> None:
    node = make_node(op, *args)
    assert out_call(node) is None
    returned = functional_call(node)
    assert returned.op is op
    assert returned.out_positions is None


def test_views_in_another_dtype_are_copied_into_the_out_tensor() -> None:
    call = out_call(make_node(aten.view_as_complex.default, X.view(6, 2)))
    assert call is not None
    assert call.op is aten.view_as_complex_copy.out
    assert call.out_positions == (1,)


def test_is_pointwise_recognizes_pointwise_operators() -> None:
    """A false positive would let a product overwrite its operands."""
    assert all(map(is_pointwise, (aten.add.out, aten.tanh.out, aten.clamp_min.out, aten.copy_.default)))
    others = aten.mm.out, aten._softmax.out, aten.sum.IntList_out, aten.cat.out
    assert not any(map(is_pointwise, others))


class Draw:
    """Draws the arguments of one call."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.dtype = rng.choice(DTYPES)
        self.shape = draw_shape(rng)

    def choose(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def tensor(self, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        return draw_tensor(self.rng, self.shape if shape is None else shape, dtype or self.dtype)

    def broadcast(self) -> Tensor:
        """Draws a tensor that is expanded in an operator, rarely one of another dtype."""
        shape = [self.choose(size, size, 1) for size in self.shape]
        shape = shape[self.choose(0, 0, self.rng.randint(0, len(shape))) :]
        return self.tensor(tuple(shape), self.choose(None, None, None, self.rng.choice(DTYPES)))

    def dim(self) -> int:
        return self.rng.randint(-len(self.shape), max(len(self.shape) - 1, 0))

    def sizes(self, count: int) -> list[int]:
        return [self.choose(1, 2, 3, 5, self.choose(0, 9, 33)) for _ in range(count)]

    def dims(self) -> list[int]:
        return self.rng.sample(range(len(self.shape)), self.rng.randint(0, len(self.shape)))


def unary(d: Draw) -> tuple[Any, ...]:
    return (d.tensor(),)


def binary(d: Draw) -> tuple[Any, ...]:
    return d.tensor(), d.broadcast()


def with_scalar(d: Draw) -> tuple[Any, ...]:
    return d.tensor(), d.choose(0, 1, 2, -1, 0.5, float("nan"))


def gradient_and(*rest: Any) -> Callable[[Draw], tuple[Any, ...]]:
    return lambda d: (d.tensor(), d.tensor(), *rest)


def clamped(d: Draw) -> tuple[Any, ...]:
    low, high = d.choose((-1, 1), (None, 0.5), (0, None), (-0.5, 2))
    return d.tensor(), low, high


def reduced(d: Draw) -> tuple[Any, ...]:
    return d.tensor(), d.choose(None, d.dims(), [d.dim()]), d.choose(False, True)


def softmax(d: Draw) -> tuple[Any, ...]:
    d.dtype = d.choose(*FLOATING)
    return d.tensor(), d.dim(), False


def softmax_backward(d: Draw) -> tuple[Any, ...]:
    d.dtype = d.choose(*FLOATING)
    return d.tensor(), d.tensor(), d.dim(), d.dtype


def product(d: Draw) -> tuple[Tensor, Tensor]:
    n, k, m = d.sizes(3)
    return d.tensor((n, k)), d.tensor((k, m))


def added_to(product: Callable[[Draw], tuple[Tensor, Tensor]]) -> Callable[[Draw], tuple[Any, ...]]:
    def arguments(d: Draw) -> tuple[Any, ...]:
        a, b = product(d)
        d.shape = (*a.shape[:-1], b.shape[-1])
        return (d.choose(d.tensor(), d.broadcast()), a, b)

    return arguments


def batched_product(d: Draw) -> tuple[Tensor, Tensor]:
    b, n, k, m = d.sizes(4)
    return d.tensor((b, n, k)), d.tensor((b, k, m))


def joined(d: Draw) -> tuple[Any, ...]:
    dim = d.dim()
    tensors = [d.tensor()]
    for _ in range(d.rng.randint(0, 2)):
        shape = list(d.shape)
        if shape:
            shape[dim] = d.rng.randint(0, 3)
        tensors.append(d.tensor(tuple(shape)))
    return tensors, dim


def pooled(d: Draw) -> tuple[Any, ...]:
    size = d.choose(1, 2, 3)
    stride, padding = d.choose([], [1, 1], [2, 2]), d.rng.randint(0, size // 2)
    images = d.tensor(draw_shape(d.rng, d.choose(3, 4)))
    return images, [size, size], stride, [padding, padding], [1, 1], d.choose(False, True)


def each(names: str, what: T) -> dict[str, T]:
    return dict.fromkeys(names.split(), what)


FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
ARGUMENTS: dict[str, Callable[[Draw], tuple[Any, ...]]] = {
    **each(
        "neg reciprocal abs sign exp log sqrt rsqrt sin cos erf gelu logical_not sigmoid tanh silu", unary
    ),
    **each("relu clone _to_copy", unary),
    **each("add.Tensor sub.Tensor mul.Tensor div.Tensor maximum minimum logical_and logical_or", binary),
    **each("eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor", binary),
    **each("eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar", with_scalar),
    **each("pow.Tensor_Scalar clamp_min clamp_max leaky_relu", with_scalar),
    "clamp": clamped,
    "where.self": lambda d: (d.tensor(dtype=torch.bool), d.tensor(), d.broadcast()),
    **each("sigmoid_backward tanh_backward silu_backward gelu_backward", gradient_and()),
    "threshold_backward": gradient_and(0),
    "leaky_relu_backward": gradient_and(0.1, False),
    "elu": lambda d: (d.tensor(), 1.5, 1, 1),
    "elu_backward": lambda d: (d.tensor(), 1.5, 1, 1, d.choose(False, True), d.tensor()),
    "softplus": lambda d: (d.tensor(), 1, 20),
    "softplus_backward": gradient_and(1, 20),
    **each("sum.dim_IntList mean.dim", reduced),
    **each("_softmax _log_softmax", softmax),
    **each("_softmax_backward_data _log_softmax_backward_data", softmax_backward),
    "mm": product,
    "addmm": added_to(product),
    "bmm": batched_product,
    "baddbmm": added_to(batched_product),
    "cat": joined,
    "max_pool2d_with_indices": pooled,
}
# Keyword arguments, each of which is given in half of the cases.
KEYWORDS: dict[str, dict[str, tuple[Any, ...]]] = {
    **each("add.Tensor sub.Tensor", {"alpha": (2, 0.5, -1)}),
    **each("addmm baddbmm", {"beta": (0, 2, 0.5), "alpha": (0, 2, 0.5)}),
    **each("sum.dim_IntList mean.dim", {"dtype": (torch.float32, torch.float64)}),
    **each("gelu gelu_backward", {"approximate": ("tanh",)}),
    "clone": {"memory_format": FORMATS},
    "_to_copy": {"dtype": DTYPES, "memory_format": FORMATS},
}
OPERATORS = sorted({*FAITHFUL_OUT_VARIANTS, "relu", "clone", "_to_copy"})


def operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def check_case(name: str, rng: random.Random) -> bool:
    """Compares a random call with the out variant; returns False if the operator refuses the arguments."""
    op, draw = operator(name), Draw(rng)
    args = ARGUMENTS[name](draw)
    kwargs = {k: draw.choose(*values) for k, values in KEYWORDS.get(name, {}).items() if rng.random() < 0.5}
    given = tree_leaves((args, kwargs))
    try:
        real = tree_leaves(op(*args, **kwargs))
    except (RuntimeError, IndexError, NotImplementedError):
        return False
    mode = RealLayouts()
    fake_args, fake_kwargs = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
    with mode:
        predicted = tree_leaves(op(*fake_args, **fake_kwargs))
    case = name, [(t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else t for t in given]
    if all(t.numel() for t in given if isinstance(t, Tensor)):  # of no elements, strides do not matter
        assert [(t.stride(), t.dtype) for t in predicted] == [(t.stride(), t.dtype) for t in real], case
    outs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).fill_(1) for t in predicted]
    before = [(out.stride(), out.data_ptr()) for out in outs]
    chosen = out_call(make_node(op, *args, **kwargs))
    assert chosen is not None
    execute(chosen, outs)
    assert before == [(out.stride(), out.data_ptr()) for out in outs], case
    assert all(map(same_bits, outs, real)), case
    return True


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.extended) for i in range(1, 12))])
def test_an_out_variant_writes_what_the_operator_returns(name: str, part: int) -> None:
    rng = random.Random(f"{seed()}/{name}/{part}")
    compared = sum(check_case(name, rng) for _ in range(CASES_OF_OPERATOR))
    assert compared > CASES_OF_OPERATOR // 8


def test_the_operator_and_its_out_variant_share_a_kernel_on_every_device() -> None:
    """A structured operator is its out variant with new memory; element-wise ones accept any strides."""
    definitions = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    structured = {
        text.partition("(")[0]
        for text in definitions.read_text().split("- func: ")
        if "\n  structured_delegate: " in text
    }
    others = FAITHFUL_OUT_VARIANTS - structured
    assert all(is_pointwise(operator(name)) for name in others), others


def test_the_out_variant_of_a_reduced_loss_writes_past_its_result() -> None:
    a, b, memory = torch.rand(8, 6), torch.rand(8, 6), torch.full((1000,), float("nan"))
    aten.huber_loss.out(a, b, 1, 1.0, out=memory[:1].view(()))
    assert int((~memory.isnan()).sum()) == a.numel()  # the result has one element
    assert out_call(fx.Graph().call_function(aten.huber_loss.default, (a, b))) is None

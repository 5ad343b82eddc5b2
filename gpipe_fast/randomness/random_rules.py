"""Replacement rules: the keyed draw for each of PyTorch's random ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast import _extension  # noqa: F401, registers torch.ops.gpipe_fast
from gpipe_fast.torch_private.operators import OpOverload

if TYPE_CHECKING:
    from gpipe_fast.randomness.random import KeyedRandomMode as DrawSource

_keyed = torch.ops.gpipe_fast


Rule = Callable[..., Any]
R = TypeVar("R", bound=Rule)
RULES: dict[OpOverload[Any, Any], Rule] = {}


def _overload(name: str) -> OpOverload[Any, Any] | None:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _rule(*names: str) -> Callable[[R], R]:
    """Registers a rule for the ops ``names``; it is called with the mode and the arguments."""

    def register(rule: R) -> R:
        # Older releases of PyTorch lack some overloads.
        RULES.update((op, rule) for op in map(_overload, names) if op is not None)
        return rule

    return register


def _sampler(functional: str, in_place: str) -> Callable[[R], R]:
    """Registers a rule that draws a tensor with the shape of its first argument.

    The functional op returns the draw; the in-place op copies it into the first argument.
    """

    def register(rule: R) -> R:
        _rule(functional)(lambda source, like, *args: _with_layout_of(like, rule(source, like, *args)))
        _rule(in_place)(lambda source, like, *args: like.copy_(rule(source, like, *args)))
        return rule

    return register


def _with_layout_of(like: Tensor, drawn: Tensor) -> Tensor:
    # Draws are contiguous, but torch's functional ops preserve the memory format of their input.
    return drawn if like.is_contiguous() else torch.empty_like(like, dtype=drawn.dtype).copy_(drawn)


@_sampler("bernoulli.p", "bernoulli_.float")
def _bernoulli(source: DrawSource, like: Tensor, p: float = 0.5) -> Tensor:
    return source.draw_like(_keyed.keyed_bernoulli, like, p)


@_sampler("bernoulli.Tensor", "bernoulli_.Tensor")
def _bernoulli_each(source: DrawSource, like: Tensor, p: Tensor) -> Tensor:
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    draw = source.draw_like(_keyed.keyed_uniform, like, 0.0, 1.0, dtype=dtype)
    return torch.lt(draw, p).to(like.dtype)


@_rule("bernoulli")
def _bernoulli_self(source: DrawSource, p: Tensor) -> Tensor:
    return _with_layout_of(p, _bernoulli_each(source, p, p))


@_sampler("uniform", "uniform_")
def _uniform(source: DrawSource, like: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return source.draw_like(_keyed.keyed_uniform, like, low, high)


@_sampler("normal_functional", "normal_")
def _normal(source: DrawSource, like: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return source.draw_like(_keyed.keyed_normal, like, mean, std)


@_sampler("exponential", "exponential_")
def _exponential(source: DrawSource, like: Tensor, rate: float = 1.0) -> Tensor:
    return source.draw_like(_keyed.keyed_exponential, like, rate)


@_sampler("log_normal", "log_normal_")
def _log_normal(source: DrawSource, like: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return _normal(source, like, mean, std).exp_()


@_sampler("cauchy", "cauchy_")
def _cauchy(source: DrawSource, like: Tensor, median: float = 0.0, scale: float = 1.0) -> Tensor:
    half_turn = _uniform(source, like, -0.5, 0.5) * math.pi
    return half_turn.tan_().mul_(scale).add_(median)


@_sampler("geometric", "geometric_")
def _geometric(source: DrawSource, like: Tensor, p: float) -> Tensor:
    # An exponential variate with this rate, rounded up, is the number of trials until the first success.
    waits = source.draw_like(_keyed.keyed_exponential, like, -math.log1p(-p), dtype=torch.float64)
    return waits.ceil_().to(like.dtype)


def _max_integer(dtype: torch.dtype) -> int:
    """Returns the largest integer that ``random_`` draws by default; up to it ``dtype`` is exact."""
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps)
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


@_sampler("random", "random_")
def _integers(source: DrawSource, like: Tensor) -> Tensor:
    return source.draw_like(_keyed.keyed_integer, like, 0, _max_integer(like.dtype))


@_sampler("random.to", "random_.to")
def _integers_below(source: DrawSource, like: Tensor, end: int) -> Tensor:
    return source.draw_like(_keyed.keyed_integer, like, 0, end - 1)


@_sampler("random.from", "random_.from")
def _integers_between(source: DrawSource, like: Tensor, low: int, end: int | None) -> Tensor:
    return source.draw_like(
        _keyed.keyed_integer, like, low, _max_integer(like.dtype) if end is None else end - 1
    )


def _factory(sized: Sequence[str], like: Sequence[str] = ()) -> Callable[[R], R]:
    """Registers a rule for factory ops.

    The rule receives the size, which is the last argument of the ``sized`` ops, and the shape of the first
    argument of the ``like`` ops.
    """

    def register(rule: R) -> R:
        def of_size(
            source: DrawSource, *args: Any, dtype: Any = None, device: Any = None, **_: Any
        ) -> Tensor:
            *parameters, size = args
            drawn: Tensor = rule(source, size, dtype, device or torch.device("cpu"), *parameters)
            return drawn

        def of_tensor(
            source: DrawSource,
            like: Tensor,
            *parameters: Any,
            dtype: Any = None,
            device: Any = None,
            **rest: Any,
        ) -> Tensor:
            drawn: Tensor = rule(source, like.shape, dtype or like.dtype, device or like.device, *parameters)
            memory_format = rest.get("memory_format") or torch.preserve_format
            out = torch.empty_like(like, dtype=drawn.dtype, device=drawn.device, memory_format=memory_format)
            return drawn if out.is_contiguous() else out.copy_(drawn)

        _rule(*sized)(of_size)
        _rule(*like)(of_tensor)
        return rule

    return register


@_factory(["rand", "rand.generator"], ["rand_like", "rand_like.generator"])
def _rand(source: DrawSource, size: Sequence[int], dtype: torch.dtype | None, device: torch.device) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    return source.draw(_keyed.keyed_uniform, size, 0.0, 1.0, dtype=dtype, device=device)


@_factory(["randn", "randn.generator", "normal.float_float"], ["randn_like", "randn_like.generator"])
def _randn(
    source: DrawSource,
    size: Sequence[int],
    dtype: torch.dtype | None,
    device: torch.device,
    mean: float = 0.0,
    std: float = 1.0,
) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    return source.draw(_keyed.keyed_normal, size, mean, std, dtype=dtype, device=device)


@_factory(
    ["randint", "randint.generator", "randint.low", "randint.low_generator"],
    ["randint_like", "randint_like.generator", "randint_like.low_dtype", "randint_like.low_generator_dtype"],
)
def _randint(
    source: DrawSource,
    size: Sequence[int],
    dtype: torch.dtype | None,
    device: torch.device,
    *bounds: int,
) -> Tensor:
    low, end = bounds if len(bounds) == 2 else (0, *bounds)
    return source.draw(_keyed.keyed_integer, size, low, end - 1, dtype=dtype or torch.int64, device=device)


@_factory(["randperm", "randperm.generator"])
def _randperm(source: DrawSource, n: int, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    # Two of the n draws of 53 bits are equal so rarely that the bias is negligible.
    order = source.draw(_keyed.keyed_uniform, [n], 0.0, 1.0, dtype=torch.float64, device=device).argsort()
    return order.to(dtype or torch.int64)


@_rule("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor")
def _normal_each(source: DrawSource, mean: Tensor | float, std: Tensor | float = 1.0) -> Tensor:
    shape = mean + torch.zeros_like(std) if isinstance(std, Tensor) else mean
    assert isinstance(shape, Tensor)
    return source.draw_like(_keyed.keyed_normal, shape, 0.0, 1.0).mul_(std).add_(mean)


@_rule("native_dropout")
def _native_dropout(
    source: DrawSource, input: Tensor, p: float, train: bool | None = None
) -> tuple[Tensor, Tensor]:
    if train is False:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    mask = _with_layout_of(input, source.draw_like(_keyed.keyed_bernoulli, input, 1.0 - p, dtype=torch.bool))
    return input.mul(mask).mul_(0.0 if p == 1.0 else 1.0 / (1.0 - p)), mask


@_rule("_fused_dropout")
def _fused_dropout(source: DrawSource, input: Tensor, keep: float) -> tuple[Tensor, Tensor]:
    mask = _with_layout_of(input, source.draw_like(_keyed.keyed_bernoulli, input, keep, dtype=torch.uint8))
    return input.mul(mask).mul_(1.0 / keep), mask


def _rrelu_noise(
    source: DrawSource, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> Tensor | float:
    if not training:
        return (lower + upper) / 2
    return torch.where(input <= 0, source.draw_like(_keyed.keyed_uniform, input, lower, upper), 1.0)


@_rule("rrelu_with_noise_functional")
def _rrelu_functional(source: DrawSource, input: Tensor, noise: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    slope = _rrelu_noise(source, input, *args)
    if isinstance(slope, Tensor):
        return input * slope, slope
    return F.leaky_relu(input, slope), noise.clone()


@_rule("rrelu_with_noise")
def _rrelu(source: DrawSource, input: Tensor, noise: Tensor, *args: Any) -> Tensor:
    out, new_noise = _rrelu_functional(source, input, noise, *args)
    noise.copy_(new_noise)
    return out


@_rule("rrelu_with_noise_")
def _rrelu_in_place(source: DrawSource, input: Tensor, noise: Tensor, *args: Any) -> Tensor:
    return input.copy_(_rrelu(source, input, noise, *args))


@_rule("multinomial")
def _multinomial(source: DrawSource, weights: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    weights = weights.double()
    if replacement:
        # Inverse transform sampling: the first category whose cumulative weight exceeds a uniform share of
        # the total weight.
        cumulative = weights.cumsum(-1)
        size = [*weights.shape[:-1], num_samples]
        share = source.draw(_keyed.keyed_uniform, size, 0.0, 1.0, dtype=torch.float64, device=weights.device)
        return torch.searchsorted(cumulative, share * cumulative[..., -1:], right=True)
    # Each category waits for an exponential time with its weight as rate; the shortest waits win. This draws
    # without replacement.
    waits = source.draw_like(_keyed.keyed_exponential, weights, 1.0)
    return (weights / waits).topk(num_samples, dim=-1).indices


def _fake_draw(key: Tensor, layer: int, ordinal: int, size: Sequence[int], *_: Any, **to: Any) -> Tensor:
    return torch.empty(size, **to)


for _op in ("bernoulli", "uniform", "normal", "exponential", "integer"):
    torch.library.register_fake(f"gpipe_fast::keyed_{_op}", _fake_draw)

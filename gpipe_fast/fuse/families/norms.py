"""LayerNorm with dropout, the addition of a residual and casts, and their gradients (kernels/norms.py).

With a residual stream of dtype S and a linear layer of dtype L::

    forward   x = residual + dropout(h)            S, from h in L
              y = layer_norm(x)                    S, cast to L if they differ
    backward  total = g_sum + dx                   S, from g in L
              dh = dropout's gradient of total     L
              sum of dh over rows                  L, the bias gradient of the linear layer that made h

The backward adds x again if only it needs x, as at the end of a post-norm block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gpipe_fast.fuse.family import Argument, Case, Numbers, Results
from gpipe_fast.fuse.launchers import CannotLaunch
from gpipe_fast.fuse.patterns import (
    BATCH,
    COLUMNS,
    EPS,
    KEEP,
    LAYER,
    LENGTH,
    ORDINAL,
    SCALE,
    Graph,
    arguments_of,
)
from gpipe_fast.kernels import norms
from gpipe_fast.kernels.philox import KeyedMask

aten = torch.ops.aten

_SHAPES = ((BATCH, LENGTH, COLUMNS), (BATCH, COLUMNS))
_KEY: Argument = ((3,), torch.int64)


@dataclass(frozen=True)
class Parameters:
    """Which parameters a norm has, and whether they need gradients."""

    weight: bool
    bias: bool
    trained: bool = True

    def arguments(self, dtype: torch.dtype) -> tuple[Argument, ...]:
        """Returns the arguments of patterns for the parameters."""
        return (((COLUMNS,), dtype),) * (self.weight + self.bias)

    def split(self, remaining: Iterator[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Returns weight and bias; None for what is absent."""
        weight = next(remaining) if self.weight else None
        return weight, next(remaining) if self.bias else None

    @property
    def wanted(self) -> list[bool]:
        """The mask of ``native_layer_norm_backward``."""
        return [True, self.weight and self.trained, self.bias and self.trained]


_PARAMETERS = (Parameters(True, True), Parameters(True, False), Parameters(False, False))
_FROZEN = (Parameters(True, True, False), Parameters(True, False, False))


def cases(stream: torch.dtype, own: torch.dtype) -> Iterator[Case]:
    """Yields the cases for a residual stream and for linear layers of these dtypes."""
    flags = (True, False)
    casts = flags if stream != own else (False,)
    for shape, parameters in itertools.product(_SHAPES, (*_PARAMETERS, *_FROZEN)):
        for dropout, sums, low, cast_g in itertools.product(flags, flags, casts, casts):
            for g_sum, recompute in ((True, False), (False, False), (False, True)):
                yield Backward(
                    stream, own, shape, parameters, dropout, g_sum, low, sums, cast_g, recompute
                ).case()
    for shape, parameters, cast in itertools.product(_SHAPES, _PARAMETERS, casts):
        for dropout, with_sum, statistics in itertools.product(flags, flags, flags):
            yield Forward(stream, own, shape, parameters, dropout, True, cast, with_sum, statistics).case()
        for statistics in flags:
            yield Forward(stream, own, shape, parameters, False, False, cast, False, statistics).case()


@dataclass(frozen=True)
class _Norm:
    stream: torch.dtype
    own: torch.dtype
    shape: tuple[int, ...]
    parameters: Parameters
    dropout: bool

    def _possible(self, graph: Graph) -> bool:
        return graph.has(*draw_of(self.dropout)) and any(map(self._is_like, graph.by_target[self._anchor]))

    @property
    def _anchor(self) -> Any:
        raise NotImplementedError

    def _is_like(self, node: fx.Node) -> bool:
        """Returns whether a node normalizes a tensor of this dtype and number of dimensions."""
        arguments = arguments_of(node)
        x: Tensor = arguments["input"].meta["val"]
        wanted = arguments.get("output_mask", self.parameters.wanted)
        parameters = (arguments["weight"] is not None, arguments["bias"] is not None)
        return (x.dtype, x.dim()) == (self.stream, len(self.shape)) and (*parameters, wanted) == (
            self.parameters.weight, self.parameters.bias, self.parameters.wanted,
        )  # fmt: skip


@dataclass(frozen=True)
class Forward(_Norm):
    """A forward: see the module's docstring."""

    residual: bool
    cast: bool
    with_sum: bool
    statistics: bool

    def case(self) -> Case:
        """Returns the case."""
        words = ["dropout"] * self.dropout + ["add"] * self.residual + ["layer norm"] + ["cast"] * self.cast
        return Case(
            ", ".join(words), self.pattern, self._arguments(), self.launch, self._anchor, 1, self._possible
        )

    @property
    def _anchor(self) -> Any:
        return aten.native_layer_norm.default

    def _arguments(self) -> tuple[Argument, ...]:
        found: list[Argument] = [(self.shape, self.own if self.residual else self.stream)]
        found += [(self.shape, self.stream)] * self.residual + [_KEY] * self.dropout
        return (*found, *self.parameters.arguments(self.stream))

    def pattern(self, h: Tensor, *rest: Tensor) -> Results:
        """The norm; the sum and the statistics if requested."""
        residual, key, weight, bias = self._split(rest)
        x = h
        if key is not None:
            x = x * keep_mask(key, self.shape) * SCALE
        if residual is not None:
            x = residual + x
        y, mean, r = aten.native_layer_norm(x, [COLUMNS], weight, bias, EPS)
        y = y.to(self.own) if self.cast else y
        return (y, *[x] * self.with_sum, *[mean, r] * self.statistics)

    def launch(self, numbers: Numbers, h: Tensor, *rest: Tensor) -> Results:
        """Replaces `pattern`."""
        residual, key, weight, bias = self._split(rest)
        mask = mask_of(numbers, key)
        check_columns(h, mask)
        found = norms.launch_forward(
            h, residual, weight, bias, numbers["eps"], "layer", mask,
            y_dtype=self.own if self.cast else self.stream, sum_dtype=self.stream,
            with_sum=self.with_sum, with_statistics=self.statistics,
        )  # fmt: skip
        one = (*h.shape[:-1], 1)
        statistics = [t.view(one) for t in (found.mean, found.r) if t is not None]
        return (found.y, *([found.total] if found.total is not None else []), *statistics)

    def _split(self, rest: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        remaining = iter(rest)
        residual = next(remaining) if self.residual else None
        key = next(remaining) if self.dropout else None
        return residual, key, *self.parameters.split(remaining)


@dataclass(frozen=True)
class Backward(_Norm):
    """A backward: see the module's docstring."""

    g_sum: bool
    low: bool
    sums: bool
    cast_g: bool
    recompute: bool

    def case(self) -> Case:
        """Returns the case."""
        words = ["dropout, add"] * self.recompute + ["layer norm backward"] + ["add"] * self.g_sum
        words += ["cast"] * self.low + ["dropout backward"] * self.dropout + ["column sums"] * self.sums
        return Case(
            ", ".join(words), self.pattern, self._arguments(), self.launch, self._anchor, 0, self._possible
        )

    @property
    def _anchor(self) -> Any:
        return aten.native_layer_norm_backward.default

    def _arguments(self) -> tuple[Argument, ...]:
        found: list[Argument] = [(self.shape, self.own if self.cast_g else self.stream)]
        found += [(self.shape, self.own)] * self.recompute + [(self.shape, self.stream)]
        found += [(self.shape, self.stream)] * self.g_sum + [_KEY] * self.dropout
        return (*found, *self.parameters.arguments(self.stream))

    def pattern(self, g: Tensor, *rest: Tensor) -> Results:
        """The gradients of the sum, of the parameters and, if it differs, of h; the column sums."""
        h, x, g_sum, key, weight, bias = self._split(rest)
        mask = None if key is None else keep_mask(key, self.shape)
        if h is not None:
            x = x + (h if mask is None else h * mask * SCALE)
        _, mean, r = aten.native_layer_norm(x, [COLUMNS], weight, bias, EPS)
        g = g.to(self.stream) if self.cast_g else g
        wanted = self.parameters.wanted
        dx, *dparameters = aten.native_layer_norm_backward(g, x, [COLUMNS], mean, r, weight, bias, wanted)
        total = dx if g_sum is None else g_sum + dx
        dh = total.to(self.own) if self.low else total
        if mask is not None:
            dh = aten.native_dropout_backward(dh, mask, SCALE)
        sums = [dh.reshape(-1, COLUMNS).sum([0], True)] * self.sums
        given = [d for d, w in zip(dparameters, wanted[1:], strict=True) if w]
        return (total, *given, *[dh] * (self.low or self.dropout), *sums)

    def launch(self, numbers: Numbers, g: Tensor, *rest: Tensor) -> Results:
        """Replaces `pattern`."""
        h, x, g_sum, key, weight, bias = self._split(rest)
        assert x is not None
        mask = mask_of(numbers, key)
        check_columns(x, mask)
        dtype, wanted = self.own if self.low else self.stream, self.parameters.wanted
        found = norms.launch_backward(
            x if h is None else h, None if h is None else x, weight, bias, g, g_sum, numbers["eps"], "layer",
            False, mask, sum_dtype=self.stream, dx_dtype=self.stream,
            dh_dtype=dtype if self.low or self.dropout else None, with_sums=self.sums,
            with_dweight=wanted[1], with_dbias=wanted[2], sums_dtype=dtype,
        )  # fmt: skip
        sums = None if found.sums is None else found.sums.view(1, -1)
        results = (found.dx, found.dweight, found.dbias, found.dh, sums)
        return tuple(t for t in results if t is not None)

    def _split(self, rest: tuple[Tensor, ...]) -> tuple[Any, ...]:
        remaining = iter(rest)
        h = next(remaining) if self.recompute else None
        x = next(remaining)
        g_sum = next(remaining) if self.g_sum else None
        key = next(remaining) if self.dropout else None
        return h, x, g_sum, key, *self.parameters.split(remaining)


def check_columns(x: Tensor, mask: KeyedMask | None = None) -> None:
    """Raises CannotLaunch if the kernels do not support rows as long as those of ``x``."""
    most = norms.max_columns(mask)
    if x.shape[-1] > most:
        raise CannotLaunch(f"rows have {x.shape[-1]} columns, the kernels support {most}")


def keep_mask(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns dropout's mask as a pattern: True where an element is kept."""
    mask: Tensor = torch.ops.gpipe_fast.keyed_bernoulli(
        key, LAYER, ORDINAL, list(shape), KEEP, dtype=torch.bool, device=key.device
    )
    return mask


def draw_of(dropout: bool) -> tuple[Any, ...]:
    """Returns the operator that draws dropout's mask, if there is one."""
    return (torch.ops.gpipe_fast.keyed_bernoulli.default,) * dropout


def mask_of(numbers: Numbers, key: Tensor | None) -> KeyedMask | None:
    """Returns the dropout of a match; None without dropout."""
    if key is None:
        return None
    return KeyedMask(key, *(numbers[name] for name in ("layer", "ordinal", "keep", "scale")))

"""Symbols for the sizes of a trace's inputs, and the guards on them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import CodeType
from typing import Any

import sympy  # type: ignore[import-untyped, unused-ignore]
import torch
from torch import Tensor

from gpipe_fast.strides import empty_like
from gpipe_fast.torch_private.fake_tensors import (
    ConstantSource,
    DimDynamic,
    FakeTensorMode,
    ShapeEnv,
    StatelessSymbolicContext,
    python_of,
)
from gpipe_fast.trace.fake import RealLayouts


class CannotExpressError(Exception):
    """A number or a tensor has no formula."""


@dataclass(frozen=True)
class Symbols:
    """The symbols of a trace.

    Attributes:
        sizes: the sizes of each input: symbols or numbers.
        strides: the strides of each input: symbols or numbers, or None where they follow from the sizes.
        guards: conditions on the symbols; where they hold, a new trace would give the same graph.
        ranges: the smallest and the largest value of each symbol.
    """

    sizes: tuple[tuple[sympy.Symbol | int | None, ...], ...]
    strides: tuple[tuple[sympy.Symbol | int | None, ...], ...]
    guards: tuple[sympy.Basic, ...]
    ranges: dict[sympy.Symbol, tuple[int, float]]

    def solve(
        self, shapes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]]
    ) -> dict[sympy.Symbol, int] | None:
        """Returns the symbols' values for inputs of these shapes and strides; None if the guards fail."""
        values: dict[sympy.Symbol, int] = {}
        own = chain(chain.from_iterable(self.sizes), chain.from_iterable(self.strides))
        given = chain(chain.from_iterable(shapes), chain.from_iterable(strides))
        for symbol, value in zip(own, given, strict=True):
            known = symbol if isinstance(symbol, int) else value
            if isinstance(symbol, sympy.Symbol):
                known = values.setdefault(symbol, value)
            if known != value:
                return None
        for symbol, (least, most) in self.ranges.items():
            if symbol not in values or not least <= values[symbol] <= most:
                return None
        try:
            return values if all(evaluated(guard, values) for guard in self.guards) else None
        except CannotExpressError:
            return None


@functools.lru_cache(maxsize=4096)
def _compiled(expression: sympy.Basic) -> tuple[CodeType, tuple[sympy.Symbol, ...]]:
    try:
        code = python_of(expression)
    except Exception:
        raise CannotExpressError from None
    return compile(code, "<expression>", "eval"), tuple(expression.free_symbols)


def evaluated(expression: sympy.Basic, values: Mapping[sympy.Symbol, Any]) -> Any:
    """Returns the value of an expression.

    Args:
        expression: an expression of PyTorch's environment of symbols.
        values: the values of its symbols: numbers, or numbers with symbols of another environment.

    Raises:
        CannotExpressError: a symbol has no value, or the expression a function without code in Python.
    """
    code, symbols = _compiled(expression)
    if not values.keys() >= set(symbols):
        raise CannotExpressError
    return eval(code, {"torch": torch, "math": math}, {str(each): values[each] for each in symbols})


class TraceMode:
    """The fake mode of traces. The runs of layers between two cuts of a stage are traced in one mode.

    Attributes:
        mode: the fake mode.
        key: a fake key for random operators.
    """

    def __init__(self, is_absent: bool = False, shape_env: ShapeEnv | None = None) -> None:
        """Makes a mode.

        Args:
            is_absent: whether tensors are on a device that the machine need not have; then no operator runs.
            shape_env: the environment of the symbols, if sizes have any.
        """
        self.mode = RealLayouts(shape_env, runs_kernels=not is_absent)
        empty = torch.zeros(3, dtype=torch.int64, device="cpu")
        self.key: Tensor = self.mode.from_tensor(empty, static_shapes=True)

    def empty(self, like: Tensor, device: torch.device, requires_grad: bool) -> Tensor:
        """Returns a fake tensor of the mode with the layout of another tensor; its sizes may be symbols."""
        with self.mode:
            return empty_like(like, device).requires_grad_(requires_grad)


class SymbolicMode(TraceMode):
    """The fake mode of traces with symbols for sizes.

    Attributes:
        inputs: fake tensors with symbols for some sizes.
    """

    def __init__(self, inputs: Sequence[Tensor], varying: Sequence[Sequence[bool]]) -> None:
        """Makes the inputs.

        Args:
            inputs: real tensors.
            varying: for each size of each input, whether it is a symbol.
        """
        self._env = ShapeEnv()
        super().__init__(shape_env=self._env)
        self.inputs = tuple(map(self._fake, range(len(inputs)), inputs, varying))
        self._sizes = tuple(tuple(map(_symbol, fake.shape)) for fake in self.inputs)
        self._strides = tuple(tuple(map(_symbol, fake.stride())) for fake in self.inputs)

    def _fake(self, index: int, tensor: Tensor, varying: Sequence[bool]) -> Tensor:
        if not tensor.dim():  # PyTorch would make the element of an integer a symbol, too
            with self.mode:
                scalar = torch.empty((), dtype=tensor.dtype, device=tensor.device)
            return scalar.requires_grad_(tensor.requires_grad)
        return self.mode.from_tensor(
            tensor,
            static_shapes=False,
            source=ConstantSource(f"input_{index}"),
            symbolic_context=StatelessSymbolicContext(
                [DimDynamic.DUCK if varies else DimDynamic.STATIC for varies in varying]
            ),
        )

    def symbols(self) -> Symbols | None:
        """Returns the symbols and their guards after the trace; None if a size depends on data."""
        env = self._env
        known = set(chain.from_iterable(self._sizes + self._strides))
        if env.deferred_runtime_asserts or not set(env.var_to_range) <= known:
            return None
        ranges = {s: (int(r.lower), float(r.upper)) for s, r in env.var_to_range.items()}
        return Symbols(self._sizes, self._strides, tuple(guard.expr for guard in env.guards), ranges)


def symbolic_size(mode: FakeTensorMode, index: int, size: int) -> torch.SymInt:
    """Returns a size as an integer that PyTorch follows.

    Args:
        mode: the mode, with an environment of symbols.
        index: the number of the size.
        size: its value, of which 0 and 1 become 2, because PyTorch would make them numbers.
    """
    found = mode.from_tensor(
        torch.empty(max(2, size), device="meta"),
        static_shapes=False,
        source=ConstantSource(f"size_{index}"),
        symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC]),
    ).shape[0]
    assert isinstance(found, torch.SymInt)
    return found


def _symbol(size: int | torch.SymInt) -> sympy.Symbol | int | None:
    if isinstance(size, torch.SymInt):
        return size.node.expr if isinstance(size.node.expr, sympy.Symbol) else None
    return size

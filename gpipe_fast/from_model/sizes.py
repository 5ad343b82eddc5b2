"""Numbers of a capture that follow from sizes of the inputs: the batch size and lengths.

A size of 4 in a capture of 4 samples may be the batch size, or a 4 that the model has by chance. PyTorch's
symbols tell the two apart.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped, unused-ignore]

from gpipe_fast.from_model.dataflow import RecordedTensor, Slice
from gpipe_fast.torch_private.fake_tensors import PythonPrinter


class Differs(Exception):
    """Raised where forward does something else for other sizes. The message says what."""


@functools.cache
def symbol_of(index: int) -> sympy.Symbol:
    """Returns the symbol of a size: ``B`` for the batch size, with index 0; then ``L1`` and so on."""
    return sympy.Symbol(f"L{index}" if index else "B", positive=True, integer=True)


def _values(sizes: Sequence[int] | Mapping[int, int]) -> dict[sympy.Symbol, sympy.Integer]:
    items = sizes.items() if isinstance(sizes, Mapping) else enumerate(sizes)
    return {symbol_of(index): sympy.Integer(size) for index, size in items}


def hold(conditions: Sequence[sympy.Basic], sizes: Sequence[int]) -> bool:
    """Returns whether conditions on the sizes of inputs hold for these sizes."""
    values = _values(sizes)
    return all(each.xreplace(values) == sympy.true for each in conditions)


@dataclass(frozen=True)
class Size:
    """A number that depends on sizes of the inputs.

    Attributes:
        expression: the number, in the symbols of the sizes.
    """

    expression: sympy.Expr

    def at(self, sizes: Sequence[int] | Mapping[int, int]) -> Any:
        """Returns the number for these sizes, the batch size first; for some of them, by index, a `Size`."""
        found = self.expression.xreplace(_values(sizes))
        if found.free_symbols:
            return Size(found)
        return int(found) if found.is_integer else float(found)

    def __str__(self) -> str:
        """Returns the number as a formula, with ``B`` for the batch size and ``L1`` for the first length."""
        return str(self.expression)

    def code(self, names: Mapping[int, str]) -> str:
        """Returns a Python expression, given the names of the variables that have the sizes."""
        symbols = {symbol_of(index): sympy.Symbol(name, integer=True) for index, name in names.items()}
        return str(PythonPrinter().doprint(self.expression.xreplace(symbols)))

    @property
    def is_batch(self) -> bool:
        """Whether it is the batch size."""
        return self.sizes() == [0] and self.is_size(0)

    @property
    def follows_batch(self) -> bool:
        """Whether it depends on the batch size."""
        return 0 in self.sizes()

    def is_size(self, index: int) -> bool:
        """Returns whether it is one of the sizes."""
        return bool(self.expression == symbol_of(index))

    def sizes(self) -> list[int]:
        """Returns the indices of the sizes on which it depends."""
        names = {str(symbol) for symbol in self.expression.free_symbols}
        return sorted(int(name[1:] or 0) for name in names)


def at_sizes(leaf: Any, sizes: Sequence[int] | Mapping[int, int]) -> Any:
    """Returns a leaf with numbers for these sizes."""
    if isinstance(leaf, Size):
        return leaf.at(sizes)
    if isinstance(leaf, Slice):
        return Slice(*(at_sizes(each, sizes) for each in (leaf.start, leaf.stop, leaf.step)))
    return leaf


def sizes_of(leaves: Sequence[Any]) -> Iterator[Size]:
    """Returns the numbers among leaves that depend on sizes."""
    for leaf in leaves:
        if isinstance(leaf, Size):
            yield leaf
        elif isinstance(leaf, Slice):
            yield from sizes_of((leaf.start, leaf.stop, leaf.step))


def batch_dims(value: RecordedTensor) -> list[int]:
    """Returns the dimensions of a value whose size follows the batch size, the first of all sizes."""
    return [dim for dim, size in enumerate(value.shape) if isinstance(size, Size) and size.follows_batch]

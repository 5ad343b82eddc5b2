"""Symbols for sizes: which shapes they fit, and the guards that a trace adds."""

from __future__ import annotations

from typing import Any

import torch

from gpipe_fast.trace.symbols import SymbolicMode, Symbols


def symbols_after(function: Any, *inputs: torch.Tensor, varying: list[list[bool]]) -> Symbols | None:
    """Returns the symbols after a function has run with fake inputs."""
    symbolic = SymbolicMode(inputs, varying)
    with symbolic.mode:
        function(*symbolic.inputs)
    return symbolic.symbols()


def test_only_varying_dimensions_have_symbols() -> None:
    x = torch.empty(5, 8)
    symbols = symbols_after(lambda x: x + 1, x, varying=[[True, False]])
    assert symbols is not None
    symbol, number = symbols.sizes[0]
    assert number == 8
    assert symbols.solve([(7, 8)], [(8, 1)]) == {symbol: 7}
    assert symbols.solve([(7, 9)], [(9, 1)]) is None


def test_equal_sizes_share_a_symbol() -> None:
    x, y = torch.empty(5, 8), torch.empty(5, 3)
    symbols = symbols_after(lambda x, y: None, x, y, varying=[[True, False]] * 2)
    assert symbols is not None
    assert symbols.solve([(7, 8), (7, 3)], [(8, 1), (3, 1)]) is not None
    assert symbols.solve([(7, 8), (6, 3)], [(8, 1), (3, 1)]) is None


def test_conditions_of_the_code_are_guards() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x[:4] if x.shape[0] > 4 else x

    symbols = symbols_after(function, torch.empty(9), varying=[[True]])
    assert symbols is not None
    assert symbols.solve([(5,)], [(1,)]) is not None
    assert symbols.solve([(4,)], [(1,)]) is None


def test_sizes_that_depend_on_elements_have_no_symbols() -> None:
    assert symbols_after(lambda x: x.nonzero(), torch.ones(9), varying=[[True]]) is None


def test_scalars_have_no_symbols() -> None:
    symbols = symbols_after(lambda x: x + 1, torch.tensor(3), varying=[[]])
    assert symbols is not None
    assert symbols.solve([()], [()]) == {}

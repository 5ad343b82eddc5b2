"""Formulas: they compute like integers, and results hold only where the recorded conditions do."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import sympy
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Mod, ModularIndexing, PythonMod

from gpipe_fast.trace.formulas import Formula, Formulas, decide, substitute
from gpipe_fast.trace.symbols import CannotExpressError

S, T = sympy.symbols("s0 s1", positive=True, integer=True)


def formulas_at(s: int = 6, t: int = 10) -> Formulas:
    return Formulas({S: s, T: t})


def number(formulas: Formulas, expression: Any) -> Formula:
    found = formulas.number(sympy.sympify(expression))
    assert isinstance(found, Formula)
    return found


ARITHMETIC: list[Callable[[Any, Any], Any]] = [
    lambda s, t: 3 * s + t - 1,
    lambda s, t: (1 - s) * t + s * 3 - t,
    lambda s, t: 3 - (t - s) * (s + 1) + 0 * t,
]


@pytest.mark.parametrize("function", ARITHMETIC)
def test_sums_differences_and_products_equal_those_of_integers(function: Callable[[Any, Any], Any]) -> None:
    formulas = formulas_at()
    found = function(number(formulas, S), number(formulas, T))
    for s, t in [(6, 10), (2, 2), (31, 7)]:
        numbers = formulas.evaluator()({S: s, T: t})
        assert numbers is not None
        assert substitute(found, numbers) == function(s, t)


@pytest.mark.parametrize(
    "expression",
    [
        64 * S * T + 3,
        S**2,
        FloorDiv(S - 9, 2) + 1,
        CleanDiv(4 * S, 2),
        Mod(S + 3, 4),
        PythonMod(S, 5),
        ModularIndexing(S, 2, 3),
        sympy.Max(S, T - 3),
        sympy.Min(2 * S, T),
    ],
    ids=str,
)
def test_expressions_evaluate_as_in_sympy(expression: sympy.Expr) -> None:
    formulas = formulas_at()
    formula = number(formulas, expression)
    evaluate = formulas.evaluator()
    for s, t in [(6, 10), (2, 2), (3, 40), (31, 7)]:
        numbers = evaluate({S: s, T: t})
        assert numbers is not None
        assert numbers[formula.position] == int(
            expression.xreplace({S: sympy.Integer(s), T: sympy.Integer(t)})
        )


@pytest.mark.parametrize("expression", [S / 4, sympy.sqrt(S), 1 / S], ids=str)
def test_other_expressions_have_no_formula(expression: sympy.Expr) -> None:
    with pytest.raises(CannotExpressError):
        formulas_at().number(expression)


COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]


@pytest.mark.parametrize("compare", COMPARISONS, ids=lambda f: f.__name__)
def test_results_hold_where_comparisons_have_the_same_outcome(compare: Callable[[Any, Any], bool]) -> None:
    for at in (5, 6, 7):
        formulas = formulas_at(at)
        taken = compare(number(formulas, S), 6)
        assert taken is compare(at, 6)
        evaluate = formulas.evaluator()
        for s in (4, 5, 6, 7, 8):
            assert (evaluate({S: s, T: 2}) is not None) == (compare(s, 6) is taken), (at, s)


def test_tuples_and_sorted_lists_record_conditions() -> None:
    formulas = formulas_at(5, 9)
    s, t = number(formulas, S), number(formulas, T)
    assert sorted([(t, 1), (s, 2)]) == [(s, 2), (t, 1)]
    assert (4, s) != (4, t)
    evaluate = formulas.evaluator()
    assert evaluate({S: 3, T: 4}) is not None
    assert evaluate({S: 4, T: 3}) is None
    assert evaluate({S: 3, T: 3}) is None


def test_decisions_of_functions_are_taken_again() -> None:
    calls: list[tuple[int, ...]] = []

    def is_even(shape: tuple[int, ...]) -> bool:
        calls.append(shape)
        return shape[0] % 2 == 0

    formulas = formulas_at(6)
    assert decide(is_even, (number(formulas, S), 3))
    evaluate = formulas.evaluator()
    assert evaluate({S: 8, T: 2}) is not None
    assert evaluate({S: 9, T: 2}) is None
    assert calls == [(6, 3), (8, 3), (9, 3)]
    assert decide(is_even, (4, 3)), "without formulas, the function is called"


@pytest.mark.parametrize("use", [hash, int, range, float, lambda f: [1, 2][f], lambda f: f < 2.5])
def test_a_formula_is_not_silently_used_as_an_integer(use: Callable[[Any], object]) -> None:
    with pytest.raises((CannotExpressError, TypeError)):
        use(number(formulas_at(), S))

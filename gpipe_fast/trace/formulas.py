"""Formulas: integers that depend on the symbols of a template, with conditions under which they hold.

Code that computes with formulas as it would with integers takes its decisions at one length. Each comparison
of formulas records its outcome as a condition; where all conditions hold, the code would take the same
decisions, so that its results need only be evaluated. In the example of gpipe_fast/trace/symbolic.py::

    at s0 = 31      a == b  for a = 64 * s0, b = 4096 is False, and is recorded
    at s0 = 45              is False, too: the results are evaluated
    at s0 = 64              is True: the code must run again

All conditions and numbers are evaluated together by one generated function.
"""

from __future__ import annotations

import operator as operators
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import sympy  # type: ignore[import-untyped, unused-ignore]

from gpipe_fast.torch_private.fake_tensors import python_of
from gpipe_fast.trace.symbols import CannotExpressError, evaluated

_Result = TypeVar("_Result")


def _arithmetic(operator: str, is_swapped: bool = False) -> Callable[[Formula, Any], Any]:
    """Returns a method that computes with a formula and another number."""

    def combine(formula: Formula, other: int | Formula) -> int | Formula:
        left, right = (other, formula) if is_swapped else (formula, other)
        return formula._formulas.combine(left, operator, right)

    return combine


def _comparison(operator: str) -> Callable[[Formula, Any], bool]:
    """Returns a method that compares a formula with another number."""
    return lambda formula, other: formula._formulas.compare(formula, operator, other)


class Formula:
    """An integer that depends on symbols. It has no hash, and does not convert to a number.

    Attributes:
        position: its position among the numbers that `Formulas.evaluator` returns.
        value: its value at the length at which decisions are taken.
    """

    __slots__ = ("_formulas", "position", "value")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, formulas: Formulas, position: int, value: int) -> None:
        self._formulas = formulas
        self.position = position
        self.value = value

    def __repr__(self) -> str:
        return f"n{self.position}"

    __add__ = __radd__ = _arithmetic("+")
    __sub__, __rsub__ = _arithmetic("-"), _arithmetic("-", is_swapped=True)
    __mul__ = __rmul__ = _arithmetic("*")
    __lt__, __le__, __gt__, __ge__ = map(_comparison, ("<", "<=", ">", ">="))

    def __eq__(self, other: object) -> bool:
        return self is other or self._formulas.compare(self, "==", other)

    def __bool__(self) -> bool:
        return self != 0

    def __index__(self) -> int:
        raise CannotExpressError

    __int__ = __float__ = __index__


# Evaluates a template's numbers for the values of its symbols; None if a condition does not hold.
Evaluator = Callable[[Mapping[sympy.Symbol, int]], Sequence[int] | None]


class Formulas:
    """The formulas of one template, and the conditions that decisions recorded."""

    def __init__(self, values: Mapping[sympy.Symbol, int]) -> None:
        """Makes formulas that take decisions as at the given values of the symbols."""
        self._values = dict(values)
        self._lines: list[str] = []
        self._known: dict[str, Formula] = {}
        self._of_expression: dict[sympy.Expr, int | Formula] = {}
        self._conditions: dict[str, bool] = {}
        self._outcomes: dict[tuple[Any, str], tuple[tuple[Any, ...], Any]] = {}

    def number(self, expression: sympy.Expr) -> int | Formula:
        """Returns the formula of an expression of symbols, or its value if it is constant.

        Raises:
            CannotExpressError: the expression has a function without a counterpart in Python.
        """
        found = self._of_expression.get(expression)
        if found is None:
            value = evaluated(expression, self._values)
            if type(value) is not int:
                raise CannotExpressError
            found = self._formula(python_of(expression), value) if expression.free_symbols else value
            self._of_expression[expression] = found
        return found

    def combine(self, left: int | Formula, operator: str, right: int | Formula) -> int | Formula:
        """Returns the sum, the difference or the product of two numbers."""
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, int) and one in (0, 1):
                    return other if one else 0
        if isinstance(right, int) and right == 0:  # of a sum or a difference
            return left
        if operator == "-" and left is right:
            return 0
        value = _OPERATORS[operator](_value(left), _value(right))
        return self._formula(f"{left!r} {operator} {right!r}", value)

    def compare(self, left: Formula, operator: str, right: object) -> bool:
        """Compares two numbers, and records the outcome as a condition."""
        if not isinstance(right, (int, Formula)):
            if operator == "==":
                return False
            raise CannotExpressError
        outcome: bool = _OPERATORS[operator](left.value, _value(right))
        self._conditions[f"{left!r} {operator} {right!r}"] = outcome
        return outcome

    def decide(self, function: Callable[..., _Result], arguments: tuple[Any, ...]) -> _Result:
        """Calls a function of numbers, and records its result as a condition."""
        found = function(*_evaluated(arguments, _value))
        self._outcomes[function, repr(arguments)] = arguments, found
        return found

    def evaluator(self) -> Evaluator:
        """Returns a function that checks the conditions and evaluates all formulas, by position."""
        conditions = [c if holds else f"not {c}" for c, holds in self._conditions.items()]
        lines = [
            f"def evaluate({', '.join(map(str, self._values))}):",
            *(f"    n{i} = {line}" for i, line in enumerate(self._lines)),
            *(f"    if not ({condition}): return None" for condition in conditions),
            f"    return [{', '.join(f'n{i}' for i in range(len(self._lines)))}]",
        ]
        made: dict[str, Any] = {}
        exec("\n".join(lines), made)  # the code consists of names, integers and operators
        evaluate, symbols = made["evaluate"], tuple(self._values)
        outcomes = [(f, arguments, found) for (f, _), (arguments, found) in self._outcomes.items()]

        def evaluator(values: Mapping[sympy.Symbol, int]) -> Sequence[int] | None:
            numbers: Sequence[int] | None = evaluate(*(values[symbol] for symbol in symbols))
            if numbers is None:
                return None
            for function, arguments, found in outcomes:
                if function(*substitute(arguments, numbers)) != found:
                    return None
            return numbers

        return evaluator

    def _formula(self, line: str, value: int) -> Formula:
        found = self._known.get(line)
        if found is None:
            found = self._known[line] = Formula(self, len(self._lines), value)
            self._lines.append(line)
        return found


_OPERATORS: dict[str, Callable[[int, int], Any]] = {
    **{"+": operators.add, "-": operators.sub, "*": operators.mul},
    **{"==": operators.eq, "<": operators.lt, "<=": operators.le, ">": operators.gt, ">=": operators.ge},
}


def decide(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Calls a function of numbers; if any of them is a formula, records the result as a condition.

    Args:
        function: a deterministic function.
        arguments: numbers, nested in tuples, and other values.
    """
    formula = next(_formulas_in(arguments), None)
    if formula is None:
        return function(*arguments)
    return formula._formulas.decide(function, arguments)


def substitute(argument: Any, numbers: Sequence[int]) -> Any:
    """Returns an argument, which may be nested in tuples and lists, with numbers in place of formulas."""
    return _evaluated(argument, lambda formula: numbers[formula.position])


def has_formula(argument: Any) -> bool:
    """Returns whether an argument, which may be nested, contains a formula."""
    return any(True for _ in _formulas_in(argument))


def _formulas_in(argument: Any) -> Iterator[Formula]:
    if isinstance(argument, Formula):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for each in argument:
            yield from _formulas_in(each)


def _evaluated(argument: Any, value_of: Callable[[Formula], int]) -> Any:
    if isinstance(argument, Formula):
        return value_of(argument)
    if isinstance(argument, (list, tuple)):
        return type(argument)([_evaluated(each, value_of) for each in argument])
    return argument


def _value(number: int | Formula) -> int:
    return number.value if isinstance(number, Formula) else number

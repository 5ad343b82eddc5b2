"""Functions with `functools.lru_cache` that a forward calls: their results are those of the cache.

A call with constants is a constant as long as the cache answers the same; with anything else, the layer runs
in Python.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.sampling import sample

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.arange(1.0, 5.0)[:, None]
STATE = {"scale": 2.0, "argument": 1.0}


def compute(add: float = 0.0, *, times: float = 1.0) -> float:
    return STATE["scale"] * times + add


def as_text(add: float = 0.0, *, times: float = 1.0) -> str:
    return str(compute(add, times=times))


def as_pair(add: float = 0.0, *, times: float = 1.0) -> tuple[float, str]:
    return compute(add, times=times), "a text"


def as_list(add: float = 0.0, *, times: float = 1.0) -> list[float]:
    return [compute(add, times=times)]


def as_tensor(add: float = 0.0, *, times: float = 1.0) -> Tensor:
    return torch.full((1,), compute(add, times=times))


def number(value: Any) -> Any:
    value = value[0] if isinstance(value, (tuple, list)) else value
    return value if isinstance(value, Tensor) else float(value)


CACHED: Any = None
FUNCTIONS = {each.__name__: each for each in (compute, as_text, as_pair, as_list, as_tensor)}
SIZES: dict[str, int | None] = {"any number": None, "one": 1}
CALLS: dict[str, Callable[[Any], Any]] = {
    "no argument": lambda layer: CACHED(),
    "an argument": lambda layer: CACHED(2.0),
    "a keyword": lambda layer: CACHED(times=3.0),
    "a global": lambda layer: CACHED(STATE["argument"]),
    "an attribute": lambda layer: CACHED(layer.argument),
    "two calls": lambda layer: (CACHED(1.0), CACHED(2.0))[1],
    "a partial": lambda layer: functools.partial(CACHED, 2.0)(),
    "a tensor": lambda layer: CACHED(layer.tensor),
    "an object": lambda layer: CACHED(layer.number),
}
IN_PYTHON = {"as_list", "as_tensor", "a tensor", "an object"}


class Number(float):
    """A number with an identity."""

    __hash__ = object.__hash__


class Layer(nn.Module):
    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.read, self.argument, self.tensor, self.number = read, 1.0, torch.ones(1), Number(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * number(self.read(self))


def replace(layer: Layer) -> None:
    globals()["CACHED"] = functools.lru_cache(CACHED.__wrapped__)


CHANGES: dict[str, Callable[[Layer], object]] = {
    "the state": lambda layer: STATE.update(scale=5.0),
    "the state and the cache": lambda layer: (STATE.update(scale=5.0), CACHED.cache_clear()),
    "the cache": lambda layer: CACHED.cache_clear(),
    "what the cache holds": lambda layer: (STATE.update(scale=5.0), CACHED(7.0)),
    "the function": lambda layer: (STATE.update(scale=5.0), replace(layer)),
    "a global argument": lambda layer: STATE.update(argument=4.0),
    "an attribute": lambda layer: setattr(layer, "argument", 4.0),
}


CASES = [
    case
    for case in itertools.product(FUNCTIONS, CALLS, CHANGES, ("pipeline", "loop"))
    if case[1] != "a tensor" or case[0] in ("compute", "as_list")  # others take no tensor
]


@pytest.mark.parametrize(("function", "call", "change", "first"), sample(CASES, 60, salt="cached functions"))
def test_results_are_those_of_the_cache(
    function: str, call: str, change: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in SIZES.values():
        monkeypatch.setitem(globals(), "CACHED", functools.lru_cache(size)(FUNCTIONS[function]))
        STATE.update(scale=2.0, argument=1.0)
        layer = Layer(CALLS[call])
        pipe = GPipe(nn.Sequential(layer), [1])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for run in range(4):
                if run == 2:
                    CHANGES[change](layer)
                runs = (pipe, layer) if first == "pipeline" else (layer, pipe)
                found, expected = (run(X) for run in runs)
                assert torch.equal(found, expected), (size, run, found, expected)
        are_refused = any("reads a cache" in str(each.message) for each in caught)
        assert are_refused == (not IN_PYTHON.isdisjoint((function, call)))

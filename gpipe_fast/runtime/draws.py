"""Python's and NumPy's random numbers in layers that a backward runs again: the second run draws the same.

PyTorch's random operators draw by key (`gpipe_fast.randomness`), but ``random`` and ``numpy.random`` have one
state for all threads. So layers that draw from them run one at a time, and a second run begins where the
first one began::

    stage 0    forward  |--draws--|                                     second run |--same--|
    stage 1                        |--draws--|   second run |--same--|
                       state:  s0          s1         s2    back to s1, then s2    back to s0, then s2
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

from gpipe_fast.trace import kinds
from gpipe_fast.trace.kinds import Kind, kind_of
from gpipe_fast.trace.reads import names_of

# Values that are looked through for generators, those nearest to the layers.
_MOST = 5_000

_drawing = threading.RLock()
os.register_at_fork(after_in_child=_drawing._at_fork_reinit)  # type: ignore[attr-defined]


@dataclass
class Drawn:
    """What a forward drew, as far as a second run needs to know.

    Attributes:
        before: states of the generators when it began.
        after: when it ended.
        repeatable: whether a second run may take its place: it did not draw beside others.
    """

    before: Sequence[object] = ()
    after: Sequence[object] = ()
    repeatable: bool = True


class Draws:
    """The generators that some layers can draw from: the global ones, and those they hold."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._held = _generators_of(layers)
        self._draw: bool | None = None  # whether they do; unknown before the first run

    @contextlib.contextmanager
    def forward(self) -> Iterator[Drawn]:
        """Around a run of the layers that will be repeated."""
        alone = self._draw is not False
        with _drawing if alone else contextlib.nullcontext():
            generators = self._generators()
            drawn = Drawn([_state_of(generator) for generator in generators])
            yield drawn
            drawn.after = [_state_of(generator) for generator in generators]
        drew = drawn.before != drawn.after
        drawn.repeatable = alone or not drew
        self._draw = self._draw is True or drew

    @contextlib.contextmanager
    def repeated(self, drawn: Drawn, name: str) -> Iterator[None]:
        """Around the second run of the layers called ``name``; the generators are put back after it.

        Raises:
            RuntimeError: the second run did not draw what the first one drew.
        """
        if drawn.before == drawn.after:
            yield
            return
        with _drawing:
            generators = self._generators()
            now = [_state_of(generator) for generator in generators]
            _restore(generators, drawn.before)
            try:
                yield
                same = [_state_of(generator) for generator in generators[: len(drawn.after)]] == drawn.after
            finally:
                _restore(generators, now)
        if not same:
            raise RuntimeError(
                f"{name} drew other random numbers when the backward ran it again: another thread draws from "
                "the same generator of Python or NumPy; draw with torch, or use checkpoint='never'"
            )

    def _generators(self) -> list[Any]:
        numpy = sys.modules.get("numpy.random")
        every = [random._inst, *self._held]
        return every if numpy is None else [*every, numpy.mtrand._rand]


def _state_of(generator: Any) -> object:
    """A generator's state, as a value that can be compared."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return pickle.dumps(kinds.state_of(generator))


def _restore(generators: Sequence[Any], states: Sequence[Any]) -> None:
    # NumPy may have been loaded meanwhile; its generator comes last.
    for generator, state in zip(generators, states, strict=False):
        if isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            kinds.set_state(generator, pickle.loads(state))


def _generators_of(layers: Sequence[nn.Module]) -> list[Any]:
    """The generators that layers hold, or that their methods name as global variables."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    pending: deque[Any] = deque(layers)
    while pending and len(seen) < _MOST:
        value = pending.popleft()
        kind = kind_of(value)
        if kind is Kind.PLAIN or id(value) in seen:
            continue
        seen.add(id(value))
        is_random = isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)
        if is_random or kind is Kind.GENERATOR:
            found[id(value)] = value
        pending.extend(kinds.referred_to_by(value))
        if isinstance(value, FunctionType) and not kinds.is_fixed(value.__module__):
            names = names_of(value.__code__).globals
            pending.extend(value.__globals__[name] for name in names if name in value.__globals__)
    found.pop(id(random._inst), None)
    return list(found.values())

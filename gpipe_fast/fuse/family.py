"""A family: patterns, each with the launcher that replaces it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gpipe_fast.fuse.launchers import CannotLaunch, trace_launcher
from gpipe_fast.fuse.patterns import TracedPattern, trace_pattern

# The shape, in sizes of gpipe_fast/fuse/patterns.py, and the dtype of one argument of a pattern.
Argument = tuple[tuple[int, ...], torch.dtype]
Numbers = Mapping[str, Any]

# Phases of the search. Forwards come after gradients, which may recompute their nodes themselves.
GRADIENTS, FORWARDS = range(2)
Results = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Case:
    """A pattern and its replacement.

    Attributes:
        name: what is fused, as in ``rotary, cast``.
        pattern: a function of operators. Its results are replaced.
        arguments: the shapes and dtypes of the pattern's arguments.
        launcher: takes the graph's numbers, and the tensors in place of the pattern's arguments. Returns
            tensors of the shapes and dtypes of the pattern's results.
        anchor: an operator of the pattern that few graphs have; without it the pattern is not even traced.
        phase: when it is searched for: `GRADIENTS` or `FORWARDS`.
    """

    name: str
    pattern: Callable[..., Any]
    arguments: tuple[Argument, ...]
    launcher: Callable[..., Results]
    anchor: Any
    phase: int

    @functools.cached_property
    def traced(self) -> TracedPattern:
        """The pattern's graph; traced once per process."""
        return trace_pattern(self.pattern, self.arguments)

    def fragment(self, numbers: Numbers, inputs: Sequence[Tensor]) -> fx.Graph | None:
        """Returns the graph of the replacement, or None if a program cannot run it."""
        layouts = tuple((t.shape, t.stride(), t.dtype, t.device) for t in inputs)
        key = (tuple(sorted(numbers.items())), layouts)
        if key not in self._fragments:
            try:
                self._fragments[key] = trace_launcher(lambda *t: self.launcher(numbers, *t), inputs)
            except CannotLaunch:
                self._fragments[key] = None
        return self._fragments[key]

    @functools.cached_property
    def _fragments(self) -> dict[Hashable, fx.Graph | None]:
        return {}

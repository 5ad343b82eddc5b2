"""Entrances to this library that torch.compile leaves as they are, with all that they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

_Parameters = ParamSpec("_Parameters")
_Returned = TypeVar("_Returned")


def uncompiled(function: Callable[_Parameters, _Returned]) -> Callable[_Parameters, _Returned]:
    """Decorates a function that Dynamo neither traces nor enters; ``fullgraph=True`` refuses it."""
    opaque = torch.compiler.disable(function, reason="a GPipe runs programs of its own")
    return cast(Callable[_Parameters, _Returned], opaque)

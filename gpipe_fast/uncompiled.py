"""A decorator that keeps public entry points, and all that they call, out of torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

_Parameters = ParamSpec("_Parameters")
_Returned = TypeVar("_Returned")


def uncompiled(
    function: Callable[_Parameters, _Returned], reason: str = "a GPipe runs its own C++ programs"
) -> Callable[_Parameters, _Returned]:
    """Disables Dynamo for a function: it is neither traced nor entered; ``fullgraph=True`` fails.

    Args:
        function: the function.
        reason: why, for Dynamo's message.
    """
    opaque = torch.compiler.disable(function, reason=reason)
    return cast(Callable[_Parameters, _Returned], opaque)

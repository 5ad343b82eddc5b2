"""The `forward` of pipelined models, which other libraries may wrap."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any


class PipelinedForward:
    """A descriptor: the forward of a class of pipelined models, or what wraps it in one of them.

    Libraries assign a wrapper to ``model.forward``, as accelerate does for mixed precision. It may not be in
    ``__dict__``, because that is the plain model's, too, whose forward would then be the pipeline.

    Args:
        function: the class's forward, which runs the pipeline.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, model: Any, owner: Any = None) -> Any:
        if model is None:
            return self._function
        return model._wrapper or MethodType(self._function, model)

    def __set__(self, model: Any, wrapper: Any) -> None:
        """Sets what wraps the pipeline.

        Raises:
            TypeError: it does not say that it wraps the present forward, by ``__wrapped__``.
        """
        if not self._is_wrapped_by(wrapper):
            name = getattr(wrapper, "__qualname__", type(wrapper).__qualname__)
            raise TypeError(
                f"denied to replace forward of a pipelined {type(model).__name__}, because the pipeline "
                f"would not run; got {name} of {getattr(wrapper, '__module__', None)}; assign a function "
                "that calls it, decorated with functools.wraps(model.forward); to TRL, pass "
                "SFTConfig(loss_type='nll')"
            )
        model._wrapper = wrapper

    def __delete__(self, model: Any) -> None:
        model._wrapper = None

    def _is_wrapped_by(self, wrapper: Any) -> bool:
        def is_the_pipeline(function: Any) -> bool:
            return getattr(function, "__func__", function) is self._function

        return is_the_pipeline(inspect.unwrap(wrapper, stop=is_the_pipeline))

"""Transforms, tracers, modes and hooks around a call that cannot observe a pipeline.

A pipeline runs programs in C++, on its own threads. Transforms, tracers and dual numbers would give wrong
results and are rejected; `torch.compile` is kept out. Dispatch and function modes and hooks on saved tensors
observe nothing, which is reported by one warning each. Modes and hooks are disabled while a plan is made, so
that they are not traced with the layers. The check runs in every call, so it reads PyTorch's cheap counters
first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from gpipe_fast.torch_private.autograd import (
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
)
from gpipe_fast.torch_private.fake_tensors import FakeTensor
from gpipe_fast.torch_private.modes import (
    DeviceContext,
    disable_current_modes,
    dispatch_modes,
    function_modes,
    has_dual_level,
    innermost_transform,
    is_of_a_tracer,
    jit_trace,
    num_dispatch_modes,
    num_function_modes,
    pop_function_mode,
    push_function_mode,
)
from gpipe_fast.torch_private.modules import global_hooks
from gpipe_fast.user_warning import warn_user

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


_ADVICE = "apply it to the plain Sequential of its layers, nn.Sequential(*model)"


_HOOKS: tuple[dict[int, Callable[..., Any]], ...] = tuple(
    global_hooks(f"_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre")
)
_forward_hooks, _forward_pre_hooks, _backward_hooks, _backward_pre_hooks = _HOOKS

_warned: set[str] = set()


def has_observers(inputs: Sequence[Tensor], modules: Callable[[], Iterable[nn.Module]]) -> bool:
    """Checks the transforms, tracers, modes and hooks around a call of a pipeline.

    Args:
        inputs: the input tensors of the call.
        modules: returns the modules of the pipeline.

    Returns:
        Whether a mode or hook would observe how a plan is made, which `without_observers` then prevents.

    Raises:
        RuntimeError: the call is inside a ``torch.func`` transform or a tracer, or has dual numbers.
    """
    transform = innermost_transform()
    if transform is not None:
        name = transform.key().name.lower()
        refuse(f"torch.func.{name}" + (" (which vjp and jacrev use)" if name == "grad" else ""))
    if jit_trace() is not None:
        refuse("torch.jit.trace")
    if has_dual_level():
        _refuse_tangents(inputs, modules())
    if any(type(tensor) is not Tensor and isinstance(tensor, FakeTensor) for tensor in inputs):
        _refuse_tracer("FakeTensorMode")
    observed = bool(_forward_hooks or _forward_pre_hooks or _backward_hooks or _backward_pre_hooks)
    if num_dispatch_modes() or num_function_modes() or top_saved_tensors_hooks(True) is not None:
        for kind, verb in _blind_observers():
            observed = True
            if kind not in _warned and not kind.startswith("gpipe_fast."):
                _warned.add(kind)
                name = kind.rsplit(".", 1)[-1].lstrip("_")
                warn_user(
                    f"{name} {verb} nothing of a GPipe, whose layers run in C++ on other threads; {_ADVICE}"
                )
    return observed


def _blind_observers() -> Iterator[tuple[str, str]]:
    """Yields the full name of each active mode or hook that cannot observe a pipeline, with its verb."""
    for mode in dispatch_modes():
        if is_of_a_tracer(mode):  # PyTorch's tracers
            own = type(mode).__module__.startswith("gpipe_fast.")
            _refuse_tracer("another GPipe's tracing" if own else type(mode).__name__)
        yield _full_name(type(mode), getattr(mode, "counter", None)), "sees"
    for mode in function_modes():
        if not isinstance(mode, DeviceContext):
            yield _full_name(type(mode)), "sees"
    hooks = top_saved_tensors_hooks(True)
    if hooks is not None:
        own = _full_name(hooks[0]).startswith("gpipe_fast.")
        yield ("gpipe_fast.hooks" if own else "torch.saved_tensors_hooks"), "(such as save_on_cpu) see"


def _full_name(what: Any, counter: object = None) -> str:
    """Returns the qualified name with its module; for a counter's internal mode, the counter's class."""
    if type(counter).__module__.startswith("gpipe_fast."):
        what = type(counter)
    return f"{getattr(what, '__module__', '')}.{getattr(what, '__qualname__', type(what).__qualname__)}"


def _refuse_tangents(inputs: Iterable[Tensor], modules: Iterable[nn.Module]) -> None:
    """Refuses tangents of inputs, parameters, buffers and tensor attributes.

    Attributes are checked because forward-mode AD replaces parameters by plain attributes.
    """
    tables = (t for m in modules for t in (m._parameters, m._buffers, vars(m)))
    held = (value for table in tables for value in table.values() if isinstance(value, Tensor))
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in chain(inputs, held)):
        refuse("forward-mode AD (its tangents would be lost)")


def _refuse_tracer(mode: str) -> NoReturn:
    refuse("torch.export" if torch.compiler.is_exporting() else mode)


def refuse(what: str) -> NoReturn:
    """Refuses a transform or a tracer.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(f"{what} cannot look into a GPipe, whose layers run in C++; {_ADVICE}")


def global_hook() -> str | None:
    """Returns the name of a global module hook that is not PyTorch's own, or None."""
    for hooks in _HOOKS:
        for hook in hooks.values():
            if not str(getattr(hook, "__module__", "")).startswith("torch."):
                return str(getattr(hook, "__qualname__", hook))
    return None


def without_observers(
    function: Callable[_Parameters, _Returned], *args: _Parameters.args, **kwargs: _Parameters.kwargs
) -> _Returned:
    """Calls a function with modes and hooks disabled, except the default device."""
    with contextlib.ExitStack() as stack:
        for disable in (_no_module_hooks, disable_current_modes, _no_function_modes, _no_saved_tensors_hooks):
            stack.enter_context(disable())
        return function(*args, **kwargs)


@contextlib.contextmanager
def _no_module_hooks() -> Iterator[None]:
    kept = [(hooks, dict(hooks)) for hooks in _HOOKS]
    try:
        for hooks in _HOOKS:
            hooks.clear()
        yield
    finally:
        for hooks, before in kept:
            since = dict(hooks)
            hooks.clear()
            hooks.update(before | since)


@contextlib.contextmanager
def _no_function_modes() -> Iterator[None]:
    modes = function_modes()
    devices = [mode for mode in modes if isinstance(mode, DeviceContext)]
    _replace_function_modes(devices)
    try:
        yield
    finally:
        _replace_function_modes(modes)


def _replace_function_modes(modes: Iterable[Any]) -> None:
    while num_function_modes():
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)


@contextlib.contextmanager
def _no_saved_tensors_hooks() -> Iterator[None]:
    kept = []
    while (hooks := top_saved_tensors_hooks(True)) is not None:
        kept.append(hooks)
        pop_saved_tensors_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(kept):
            push_saved_tensors_hooks(pack, unpack)

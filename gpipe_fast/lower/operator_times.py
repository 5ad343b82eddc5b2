"""The time that an operator of a graph takes: measured once for equal calls, or estimated.

A call is measured alone, on tensors with the shapes, strides and dtypes of the trace. An estimate counts the
bytes that the call moves, and its floating point operations, if it is a matrix product, a convolution or
attention (``torch.utils.flop_counter``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from gpipe_fast.devices import made_current
from gpipe_fast.lower.operator_examples import CANNOT_RUN, Spec, as_in_a_program, examples
from gpipe_fast.lower.work import is_attention
from gpipe_fast.torch_private.operators import OpOverload
from gpipe_fast.trace.tensor_metadata import AnyTensor

# Operations and bytes in a nanosecond, for estimates; and the nanoseconds that any call takes.
_RATES = {"cpu": (50, 10), "cuda": (200_000, 2_000)}
_LEAST = 1_000
# The number of timed runs of a call; only one if it is long, and more if they are brief, since something else
# may run beside some of them.
_RUNS, _MOST_RUNS = 3, 20
_BRIEF, _LONG = 2_000_000, 20_000_000

# By everything that the time depends on; in nanoseconds.
_known: dict[Hashable, int] = {}


def nanoseconds(node: fx.Node, measures: bool = True) -> int:
    """Returns the time of an operator, in nanoseconds; at least 1.

    It is estimated if only deterministic algorithms are allowed, so that it is the same in every run; if the
    device is not there; and if the operator cannot run alone.

    Args:
        node: the operator.
        measures: whether it may be measured; else it is estimated.
    """
    device = _device(node)
    is_there = device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())
    measures = measures and is_there and not torch.are_deterministic_algorithms_enabled()
    arguments: Any = fx.map_arg((node.args, dict(node.kwargs)), _spec)
    key = node.target, repr(arguments), device, torch.get_num_threads(), measures
    found = _known.get(key)
    if found is None:
        found = _measured(node, arguments, device) if measures else None
        found = _known[key] = _estimated(node, device) if found is None else found
    return found


def _spec(node: fx.Node) -> Any:
    """Returns what stands for a node among arguments: a tensor's spec, or another value."""
    value = node.meta.get("val")
    if not isinstance(value, AnyTensor):
        return value
    return Spec(tuple(value.shape), tuple(value.stride()), value.dtype)


def _device(node: fx.Node) -> torch.device:
    values = [node.meta.get("val")]
    if isinstance(values[0], (list, tuple)):
        values = list(values[0])
    return next((v.device for v in values if isinstance(v, AnyTensor)), torch.device("cpu"))


def _measured(node: fx.Node, arguments: Any, device: torch.device) -> int | None:
    """Returns the least time of some runs; None if the operator cannot run alone."""
    if not isinstance(node.target, OpOverload):  # the launch of a kernel
        return None
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    with as_in_a_program(), made_current(device):
        try:
            args, kwargs = examples(arguments, device)
            least, runs, total = None, 0, 0
            # The first is not counted, unless it is long.
            while runs <= _RUNS or (total < _BRIEF and runs <= _MOST_RUNS):
                begin = time.perf_counter_ns()
                node.target(*args, **kwargs)
                wait()
                taken = max(1, time.perf_counter_ns() - begin)
                least = taken if runs == 1 or least is None else min(least, taken)
                total += taken
                runs += _RUNS if taken > _LONG else 1
            return least
        except CANNOT_RUN:
            return None


def _estimated(node: fx.Node, device: torch.device) -> int:
    rate, moved = _RATES.get(device.type, _RATES["cuda"])
    specs: list[Any] = []
    fx.map_arg((node.args, dict(node.kwargs)), lambda n: specs.append(n.meta.get("val")))
    value = node.meta.get("val")
    specs += value if isinstance(value, (list, tuple)) else [value]
    size = sum(int(t.numel()) * t.element_size() for t in specs if isinstance(t, AnyTensor))
    return _LEAST + size // moved + operations(node) // rate


def operations(node: fx.Node) -> int:
    """Returns the floating point operations of a product, a convolution or attention; else 0."""
    if not isinstance(node.target, OpOverload):
        return 0
    arguments: Any = fx.map_arg((node.args, dict(node.kwargs)), _spec)
    try:
        args, kwargs = examples(arguments, "meta")
        if is_attention(node):
            return int(sdpa_flop_count(*(each.shape for each in args[:3])))
        count = flop_registry.get(node.target.overloadpacket)
        return 0 if count is None else int(count(*args, **kwargs, out_val=node.target(*args, **kwargs)))
    except CANNOT_RUN:
        return 0

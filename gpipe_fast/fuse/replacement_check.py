"""Compares kernels with the nodes that they replace, the first time that they run on a device."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gpipe_fast.fuse.accuracy import error_ratio
from gpipe_fast.fuse.launchers import launches_in
from gpipe_fast.fuse.left_out import leave_out
from gpipe_fast.lower.launch import KernelLaunch, is_launch

aten = torch.ops.aten

# The third argument of these operators makes their result fp32.
_WITH_HALF_TO_FLOAT = (aten._softmax.default, aten._log_softmax.default)

_lock = threading.Lock()
_passed: set[tuple[torch.device, Hashable]] = set()


def has_passed(launch: KernelLaunch, device: torch.device) -> bool:
    """Returns whether a kernel has been compared on a device in this process."""
    return (device, launch.specialization) in _passed


class ReplacementCheck:
    """A check of one replacement, called by the program after its launches until it is done."""

    def __init__(self, reference: fx.Graph, fragment: fx.Graph, device: torch.device) -> None:
        """Makes a check.

        Args:
            reference: the replaced nodes, as a graph with the replacement's inputs and outputs.
            fragment: the graph of the replacement.
            device: the device that the kernels run on.
        """
        self._reference, self._fragment, self._device = reference, fragment, device
        self._launches = launches_in(fragment)

    def __call__(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
        """Compares the launches' results, and overwrites them by PyTorch's if they are wrong.

        A wrong kernel's results are overwritten in all micro-batches until the next mini-batch, whose plan
        leaves the kernel out.

        Args:
            inputs: the tensors that the replaced nodes read.
            results: all outputs of the launches, in order.

        Returns:
            Whether the check is done: all kernels have passed, or memory ran out (a later plan checks again).
        """
        if not self._have_passed():
            with torch.no_grad(), contextlib.suppress(torch.OutOfMemoryError):
                self._check(inputs, results)
                return self._have_passed()
        return True

    def _have_passed(self) -> bool:
        return all(has_passed(launch, self._device) for launch in self._launches)

    def _check(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        expected = _Reference(self._reference).run(*inputs)
        exact = _InFloat64(self._reference).run(*inputs)
        perturbed = _Perturbed(self._reference).run(*inputs)
        found = _WithResults(self._fragment, self._launches, results).run(*inputs)
        ratio = max(map(error_ratio, found, expected, exact, perturbed), default=0.0)
        if ratio > 1:
            # If another launch is at fault, the checks of the next plan find it.
            suspect = next(launch for launch in self._launches if not has_passed(launch, self._device))
            leave_out(suspect, f"on {self._device} its error was {ratio:.2g} times the error allowed")
            for view, value in zip(found, expected, strict=True):  # views of results (`trace_launcher`)
                view.copy_(value)
        elif all(bool(t.isfinite().any()) for t in expected):  # else nothing was compared
            with _lock:
                _passed.update((self._device, launch.specialization) for launch in self._launches)


class _Reference(fx.Interpreter):
    """Runs a functional graph on real tensors."""

    def __init__(self, graph: fx.Graph) -> None:
        # Without a `GraphModule`, which generates code, also for launches.
        super().__init__(torch.nn.Module(), graph=graph)


class _InFloat64(_Reference):
    """Runs a graph with all floating-point tensors in float64."""

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Returns an argument in float64."""
        return _to_float64(super().placeholder(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operator that returns float64 where its results are floating-point numbers."""
        args, kwargs = fx.node.map_aggregate((args, kwargs), _dtype_to_float64)
        if target in _WITH_HALF_TO_FLOAT:  # with half_to_float they accept only fp16
            args, kwargs = (*args[:2], False), {}
        return super().call_function(target, args, kwargs)


class _Perturbed(_InFloat64):
    """Runs a graph in float64, with inputs that differ by one rounding to fp32, up or down."""

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Returns a perturbed argument."""
        value = super().placeholder(target, args, kwargs)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        order = torch.arange(value.numel(), device=value.device).reshape(value.shape)
        up = (order * 40503) % 65536 < 32768  # no period that a reduction could meet
        return value * (1 + torch.finfo(torch.float32).eps * (2.0 * up - 1))


def _to_float64(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _dtype_to_float64(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


class _WithResults(_Reference):
    """Runs a fragment whose launches have run already."""

    def __init__(self, graph: fx.Graph, launches: Sequence[KernelLaunch], results: Sequence[Tensor]) -> None:
        super().__init__(graph)
        remaining = iter(results)
        self._results = iter([tuple(next(remaining) for _ in launch.outputs) for launch in launches])

    def run_node(self, n: fx.Node) -> Any:
        """Returns a launch's results, or runs an operator."""
        return next(self._results) if is_launch(n) else super().run_node(n)


def results_of(fragment: fx.Graph) -> list[fx.Node]:
    """Returns the nodes of all outputs of a fragment's launches, in order."""
    found = []
    for node in fragment.nodes:
        if is_launch(node):
            by_position = {u.args[1]: u for u in node.users if u.target is operator.getitem}
            found += [by_position[i] for i in range(len(by_position))]
    return found

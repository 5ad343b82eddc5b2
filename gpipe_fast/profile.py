"""The layer profiler: measures time, operations and memory of each layer on copies of the layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from gpipe_fast import devices as _devices
from gpipe_fast.devices import Device, intra_op_threads, moved
from gpipe_fast.layers.device_memory import check_layers_fit, check_layers_have_data
from gpipe_fast.layers.quantized import stored_bytes, stored_tensors
from gpipe_fast.layers.structure import (
    BatchDim,
    Inputs,
    LayerSequence,
    Structure,
    call_unpacked,
    flatten,
    layer_title,
    threads_of,
)
from gpipe_fast.progress import working
from gpipe_fast.skip import Key, declared, skip_scope

__all__ = ["LayerProfile", "profile_layers", "table"]

# The minimum number of timed rounds over all layers, and the number that fits into the timeout if no layer is
# slow.
MIN_ROUNDS, TARGET_ROUNDS = 3, 10

_T = TypeVar("_T")


@dataclass(frozen=True)
class LayerProfile:
    """The costs of one layer for one micro-batch.

    Attributes:
        index: the layer's position in the sequence.
        name: the layer's name in the sequence.
        kind: the name of the layer's class.
        forward_seconds: median time of the forward; NaN if nothing was timed.
        backward_seconds: median time of the backward, including the accumulation into the parameters'
            gradients; NaN if nothing was timed, 0 if no output requires a gradient.
        flops: floating point operations of the forward alone. A multiply-add counts as two. Only the
            operators that PyTorch's `FlopCounterMode` knows count (matrix products, convolutions, attention).
        parameter_bytes: size of the parameters, without gradients.
        activation_bytes: size of the tensors that autograd saves for the backward, each storage counted once,
            without parameters and buffers. A saved input counts, though the previous layer may save it too.
        boundary_bytes: size of the tensors that would cross a stage boundary after the layer: the layer's
            output, and skip tensors stashed by then but not popped yet.
        threads: the number of intra-op threads with which the times were measured.
    """

    index: int
    name: str
    kind: str
    forward_seconds: float
    backward_seconds: float
    flops: int
    parameter_bytes: int
    activation_bytes: int
    boundary_bytes: int
    threads: int = 0


def profile_layers(
    module: nn.Sequential | LayerSequence,
    sample: Any,
    *,
    device: Device | None = None,
    timeout: float | None = 1.0,
    chunks: int = 1,
    threads: int | None = None,
    progress: bool | None = None,
) -> list[LayerProfile]:
    """Measures each layer on a copy in train mode; only one copy at a time is on the device.

    The layers are timed in rounds over all layers, so that a temporary slowdown of the machine affects all
    of them. The first round counts bytes and operations. Parameters, buffers, gradients, the sample and
    PyTorch's random state are left unchanged::

        print(table(profile_layers(model, torch.randn(128, 3, 224, 224), chunks=8)))

    Args:
        module: the layers, as a ``Sequential`` or a `GPipe`.
        sample: a mini-batch, the only argument of a `GPipe` call; if its tensors require gradients, the first
            layer's backward computes them.
        device: the device to measure on; by default CUDA if available, else the CPU.
        timeout: the time to measure for, in seconds, and for at least three rounds; None skips timing.
        chunks: the number of micro-batches in the sample; layers run on the first one, the largest.
        threads: the number of intra-op threads; by default those of a stage if ``module`` is a `GPipe`, else
            the caller's, which a pipeline of K stages would divide by K.
        progress: whether to show at once which layer is measured, in a line that is rewritten; by default
            only after two seconds and on a terminal, and elsewhere one line says that layers are measured.

    Raises:
        TypeError: ``module`` is neither a ``Sequential`` nor a `GPipe`, or ``sample`` contains no tensor.
        ValueError: a parameter is lazy or on the meta device; a layer is larger than the device; the device
            is neither a CPU nor a CUDA device; ``chunks`` or ``threads`` is not positive; or ``timeout`` is
            negative.
        RuntimeError: a layer fails; the message names the layer.
    """
    check_is_sequence(module)
    if timeout is not None:
        check_timeout(timeout)
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ValueError(f"threads must be a positive integer, got {threads!r}")
    layers = _layers(module)
    target = (_devices.default_devices() or [torch.device("cpu")])[0]
    if device is not None:
        target = _devices.parse_device(device, "device")
    if target.type not in ("cpu", "cuda"):
        raise ValueError(f"layers can be profiled only on CPU and CUDA devices, got {target}")
    check_layers_have_data(layers)
    check_layers_fit(layers, target)
    # A sample that is not split may be a `CallArguments`, to whose tensors `batch_dim` does not apply.
    batch_dim = module.batch_dim if isinstance(module, LayerSequence) and chunks > 1 else 0
    threads = threads or threads_of(module)
    times: list[list[tuple[float, float]]] = [[] for _ in layers]
    with (
        torch.random.fork_rng([target] if target.type == "cuda" else []),
        torch.inference_mode(False),
        torch.enable_grad(),
        intra_op_threads(threads),
        working("measuring layers", show=progress) as work,
    ):
        first, number = _first_microbatch(sample, chunks, target, batch_dim), itertools.count(1)
        expected = len(layers) * (1 if timeout is None else 1 + TARGET_ROUNDS)

        def measured(measure: Callable[[_LayerCopy], _T]) -> list[_T]:
            """Measures a copy of each layer on the output of the one before."""
            found, given = list[_T](), first
            for name, layer in layers:
                try:
                    own = _LayerCopy(layer, given, target)
                    found.append(measure(own))
                except Exception as error:
                    raise RuntimeError(f"{layer_title(name, layer)} cannot be profiled: {error}") from error
                given = own.output
                work.count(next(number), expected)
            return found

        sizes = measured(_LayerCopy.sizes)
        if timeout is not None and layers:
            share = timeout / (TARGET_ROUNDS * len(layers))
            begun, rounds = perf_counter(), 0
            while rounds < MIN_ROUNDS or perf_counter() - begun < timeout:
                for found, new in zip(times, measured(lambda each: each.times(share)), strict=True):
                    found += new
                rounds += 1
    profiles = []
    for index, (name, layer) in enumerate(layers):
        own = times[index]
        forward, backward = map(median, zip(*own, strict=True)) if own else (math.nan, math.nan)
        kind = type(layer).__name__
        profiles.append(LayerProfile(index, name, kind, forward, backward, *sizes[index], threads))
    return profiles


def check_timeout(timeout: float) -> None:
    """Checks a timeout.

    Raises:
        ValueError: ``timeout`` is not a number of seconds, at least 0.
    """
    if not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ValueError(f"timeout must be a number of seconds, at least 0, got {timeout!r}")


def check_is_sequence(module: nn.Module) -> None:
    """Checks that a module is a sequence of initialised layers.

    Raises:
        TypeError: ``module`` is neither a ``Sequential`` nor a `GPipe`.
        ValueError: a layer has lazy parameters.
    """
    if not isinstance(module, (nn.Sequential, LayerSequence)):
        raise TypeError(f"module must be nn.Sequential to be partitioned, got {type(module).__name__}")
    for name, layer in _layers(module):
        if any(map(nn.parameter.is_lazy, chain(layer.parameters(), layer.buffers()))):
            raise ValueError(
                f"{layer_title(name, layer)} has lazy parameters; run the module once on a sample"
            )


def table(profiles: Iterable[LayerProfile]) -> str:
    """Formats profiles as a table with one row per layer, and a line on the number of threads.

    Raises:
        TypeError: an element is not a `LayerProfile`.
    """
    profiles = list(profiles)
    if not all(isinstance(each, LayerProfile) for each in profiles):
        raise TypeError(
            f"expected LayerProfile objects, got {', '.join(type(each).__name__ for each in profiles)}"
        )
    headers = ["layer", "class", "forward ms", "backward ms", "MFLOP"]
    headers += [f"{what} MiB" for what in ("parameters", "activations", "boundary")]
    rows: list[list[object]] = []
    for p in profiles:
        sizes = [size / 2**20 for size in (p.parameter_bytes, p.activation_bytes, p.boundary_bytes)]
        times = [p.forward_seconds * 1e3, p.backward_seconds * 1e3]
        rows.append([p.name, p.kind, *times, p.flops / 1e6, *sizes])
    names = [0, 1] if rows else False  # tabulate fails on columns without a row
    text: str = tabulate(rows, headers, tablefmt="simple", floatfmt=".3f", disable_numparse=names)
    counts = sorted({p.threads for p in profiles if p.threads and not math.isnan(p.forward_seconds)})
    threads = ", ".join(map(str, counts))
    return f"{text}\n\nintra-op threads: {threads}" if counts else text


def _layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    # named_children() would skip repeated occurrences of a layer.
    return [(name, layer) for name, layer in module._modules.items() if layer is not None]


class _Values(NamedTuple):
    """The output of one layer and input of the next: leaves that require gradients where the output does.

    Attributes:
        tensors: the output's tensors, in order.
        structure: the nesting of the tensors.
        unpopped_skips: skip tensors that no layer has popped yet.
    """

    tensors: Sequence[Tensor]
    structure: Structure
    unpopped_skips: Mapping[Key, Tensor | None]


class _FlopCounter(FlopCounterMode):
    """A FLOP counter that counts a nested pipeline as zero, without a warning."""


def _first_microbatch(sample: Any, chunks: int, device: torch.device, batch_dim: BatchDim = 0) -> _Values:
    """Returns the input of the first layer: the first micro-batch of a sample.

    Raises:
        TypeError: ``sample`` contains no tensor, or an object that is neither a tensor nor a constant.
        ValueError: ``sample`` is on the meta device, or ``chunks`` is not positive.
    """
    if type(chunks) is not int or chunks < 1:
        raise ValueError(f"number of chunks must be positive integer, got {chunks!r}")
    inputs = Inputs.of((sample,), {}, batch_dim)
    if not inputs.tensors:
        raise TypeError(
            f"expected Tensor, but got {type(sample).__name__}; the sample needs at least one tensor"
        )
    if any(tensor.is_meta for tensor in inputs.tensors):
        raise ValueError("the sample is on the meta device; pass one with data")
    tensors = inputs.tensors if chunks == 1 else inputs.dims.split(inputs.tensors, chunks)[0]
    return _Values([_leaf(moved(tensor, device)) for tensor in tensors], inputs.structure, {})


class _LayerCopy:
    """A copy of a layer in train mode, with its input; it may run any number of times.

    Args:
        layer: the layer to copy; it is not changed.
        given: the layer's input; it is not changed.
        device: the device on which the copy runs.

    Attributes:
        output: the output of the latest run.
    """

    def __init__(self, layer: nn.Module, given: _Values, device: torch.device) -> None:
        self._layer = deepcopy(layer)._apply(lambda tensor: moved(tensor, device)).train()
        for parameter in self._layer.parameters():
            parameter.grad = None
        wanted = set(declared(layer)[1])
        self._popped = {key: x for key, x in given.unpopped_skips.items() if key in wanted}
        self._given, self._device, self.output = given, device, given

    def sizes(self) -> tuple[int, int, int, int]:
        """Runs the forward, and counts operations, and the bytes of a `LayerProfile`, in its order."""
        saved: dict[int, torch.UntypedStorage] = {}  # keeps storages alive so that no address is reused

        def pack(tensor: Tensor) -> Tensor:
            if tensor.layout == torch.strided:
                saved.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
            return tensor

        with _FlopCounter(display=False) as counter, saved_tensors_hooks(pack, lambda tensor: tensor):
            self._forward()
        for tensor in chain(self._layer.parameters(), self._layer.buffers()):
            for stored in stored_tensors(tensor):
                saved.pop(stored.untyped_storage().data_ptr(), None)
        crossing = (*self.output.tensors, *self.output.unpopped_skips.values())
        return (
            counter.get_total_flops(),
            sum(map(stored_bytes, self._layer.parameters())),
            sum(storage.nbytes() for storage in saved.values()),
            sum(x.numel() * x.element_size() for x in crossing if x is not None),
        )

    def times(self, seconds: float) -> list[tuple[float, float]]:
        """Measures forwards and backwards for about ``seconds``, at least one of each.

        An additional first run is discarded: it warms up, and creates the gradients to which the later runs
        add, as do all micro-batches of a mini-batch but one.
        """
        found: list[tuple[float, float]] = []
        begun = perf_counter()
        self._time()
        while not found or perf_counter() - begun < seconds:
            found.append(self._time())
        return found

    def _time(self) -> tuple[float, float]:
        forward, outputs = self._forward()
        differentiable = [y for y in outputs if y.requires_grad]
        if not differentiable:
            return forward, 0.0
        gradients = [torch.ones_like(y) for y in differentiable]
        begun = self._clock()
        torch.autograd.backward(differentiable, gradients)
        return forward, self._clock() - begun

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()

    def _forward(self) -> tuple[float, list[Tensor]]:
        """Runs the forward on copies of the input, which the layer may change, and stores the output.

        Returns:
            The time, and the tensors of the output with their autograd history.
        """
        popped = {key: None if x is None else _leaf(x).clone() for key, x in self._popped.items()}
        value = self._given.structure.build([_leaf(x).clone() for x in self._given.tensors])
        with skip_scope(popped) as stashed:
            begun = self._clock()
            output = call_unpacked(self._layer, value)
            seconds = self._clock() - begun
        tensors, structure = flatten(output, deduplicate=True)
        passed_on = {key: x for key, x in self._given.unpopped_skips.items() if key not in self._popped}
        unpopped_skips = passed_on | {key: None if x is None else _leaf(x) for key, x in stashed.items()}
        self.output = _Values([_leaf(x) for x in tensors], structure, unpopped_skips)
        return seconds, [*tensors, *(x for x in stashed.values() if x is not None)]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)

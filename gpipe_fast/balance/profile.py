"""What each layer of a sequence costs: seconds, operations and bytes, measured on copies of the layers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch
from tabulate import tabulate
from torch import nn

from gpipe_fast import devices as _devices
from gpipe_fast.balance.capacity import check_fits
from gpipe_fast.balance.visit import Handed, Seconds, Visit, first_microbatch
from gpipe_fast.devices import Device
from gpipe_fast.layers.structure import LayerSequence
from gpipe_fast.layers.title import title

# Rounds over all layers: at least so many are timed, and so many fit into the timeout if no layer is slow.
LEAST_ROUNDS, USUAL_ROUNDS = 3, 10
# A bar that nobody asked for shows when profiling takes longer.
BAR_AFTER_SECONDS = 2.0

_T = TypeVar("_T")


@dataclass(frozen=True)
class LayerProfile:
    """What one layer costs for one micro-batch.

    Attributes:
        index: its position in the sequence.
        name: its name there.
        kind: its class.
        forward_seconds: median; NaN if nothing was timed.
        backward_seconds: likewise, with gradients added to those of parameters; 0 if none needs a gradient.
        flops: floating point operations of the forward alone, a multiplication and an addition counting as
            two, as far as PyTorch's `FlopCounterMode` knows the operators (matrix products, convolutions,
            attention).
        parameter_bytes: of its parameters, without gradients.
        activation_bytes: of what autograd saves for its backward, each storage once, parameters and buffers
            left out. Its input counts if it is saved, though the layer before may save it too.
        boundary_bytes: of what would cross a cut after it: its output, and skip tensors that it or a layer
            before has stashed and none has popped yet.
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


def profile_layers(
    module: nn.Sequential | LayerSequence,
    sample: Any,
    *,
    device: Device | None = None,
    timeout: float | None = 1.0,
    chunks: int = 1,
    progress: bool | None = None,
) -> list[LayerProfile]:
    """Measures each layer on a copy of it, in train mode; one copy at a time is on the device.

    All layers take turns, round after round, so that a slow spell of the machine meets them all. A first
    round counts bytes and operations. Parameters, buffers, gradients, the sample and PyTorch's
    random state are afterwards what they were::

        print(table(profile_layers(model, torch.randn(128, 3, 224, 224), chunks=8)))

    Args:
        module: the layers, as a ``Sequential`` or a `GPipe`.
        sample: a mini-batch, as `GPipe` takes it as its only argument; where its tensors require gradients,
            the first layer computes them.
        device: where to measure; by default CUDA if there is any, else the CPU.
        timeout: seconds to go on for, at least three rounds; None times nothing.
        chunks: into how many micro-batches the sample is cut; the first, the largest, is what layers get.
        progress: whether to show a bar, through tqdm if it is installed; by default on a terminal, if it
            takes longer than two seconds.

    Raises:
        TypeError: ``module`` is neither a ``Sequential`` nor a `GPipe`, or there is no tensor in ``sample``.
        ValueError: a parameter is not there yet (on the meta device, or lazy), a layer is larger than the
            device, which is neither a CPU nor a CUDA device, or ``chunks`` or ``timeout`` is not positive.
        RuntimeError: a layer fails; the message names it.
    """
    check_layers(module)
    if timeout is not None:
        check_timeout(timeout)
    return profile(module, sample, device, timeout=timeout, chunks=chunks, progress=progress)


def check_timeout(timeout: float) -> None:
    """Refuses what is no number of seconds.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ValueError(f"timeout must be a number of seconds, at least 0, got {timeout!r}")


def check_layers(module: nn.Module) -> None:
    """Refuses what has no layers that can be copied and run.

    Raises:
        TypeError: it is neither a ``Sequential`` nor a `GPipe`.
        ValueError: a layer has lazy parameters.
    """
    if not isinstance(module, (nn.Sequential, LayerSequence)):
        raise TypeError(f"module must be nn.Sequential to be partitioned, got {type(module).__name__}")
    for name, layer in _layers(module):
        if any(map(nn.parameter.is_lazy, chain(layer.parameters(), layer.buffers()))):
            raise ValueError(f"{title(name, layer)} has lazy parameters; run the module once on a sample")


def profile(
    module: nn.Sequential | LayerSequence,
    sample: Any,
    device: Device | None,
    *,
    timeout: float | None,
    chunks: int = 1,
    progress: bool | None = None,
) -> list[LayerProfile]:
    """`profile_layers` without its checks."""
    layers = _layers(module)
    place = default_device() if device is None else _devices.named_device(device, "device")
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"layers are measured on CPU and CUDA devices, got {place}")
    check_fits(layers, place)
    visits = len(layers) * (1 if timeout is None else 1 + LEAST_ROUNDS)
    # What is not cut into several may be a `Call`, whose tensors are counted otherwise than a mini-batch's.
    batch_dim = module.batch_dim if isinstance(module, LayerSequence) and chunks > 1 else 0
    with _apart(place), _bar(progress, visits) as advance:
        first = first_microbatch(sample, chunks, place, batch_dim)
        rounds = _Rounds(layers, first, place, timeout, advance)
        sizes, times = rounds.over(Visit.sizes), rounds.times()
    return [
        LayerProfile(
            index,
            name,
            type(layer).__name__,
            median(run.forward for run in times[index]),
            median(run.backward for run in times[index]),
            *sizes[index],
        )
        for index, (name, layer) in enumerate(layers)
    ]


def table(profiles: Iterable[LayerProfile]) -> str:
    """A row for each layer.

    Raises:
        TypeError: these are no profiles.
    """
    profiles = list(profiles)
    if not all(isinstance(each, LayerProfile) for each in profiles):
        raise TypeError(
            f"expected what profile_layers returns, got {', '.join(type(each).__name__ for each in profiles)}"
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
    return text


def default_device() -> torch.device:
    """CUDA if there is any, else the CPU."""
    devices = _devices.default_devices()
    return devices[0] if devices else torch.device("cpu")


def _layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    # Not named_children(), which leaves out a layer that comes again.
    return [(name, layer) for name, layer in module._modules.items() if layer is not None]


@contextlib.contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Draws of a block leave PyTorch's random state as it was; gradients are on in it."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        yield


@contextlib.contextmanager
def _bar(show: bool | None, expected: int) -> Iterator[Callable[[int], object]]:
    """A progress bar; what it yields counts one visit, and takes how many are now expected in all."""
    try:
        from tqdm import tqdm
    except ImportError:
        show = False
    if show is False:
        yield lambda expected: None
        return
    hidden, delay = (False, 0.0) if show else (None, BAR_AFTER_SECONDS)  # None: where there is no terminal
    words = {"desc": "profiling", "unit": " layers"}
    with tqdm(total=expected, leave=False, disable=hidden, delay=delay, **words) as bar:

        def advance(expected: int) -> None:
            bar.total = expected
            bar.update()

        yield advance


class _Rounds:
    """Visits all layers in order, each with what the one before hands on.

    Args:
        layers: with their names.
        sample: what the first one gets.
        device: where copies of them run.
        timeout: seconds to time them for, or None.
        advance: called after each visit with how many visits are expected in all.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        sample: Handed,
        device: torch.device,
        timeout: float | None,
        advance: Callable[[int], object],
    ) -> None:
        self._layers, self._sample, self._device = layers, sample, device
        self._timeout, self._advance = timeout, advance
        self._expected = 1 if timeout is None else 1 + LEAST_ROUNDS

    def over(self, visit: Callable[[Visit], _T]) -> list[_T]:
        """One round; what a visit comes to, for each layer.

        Raises:
            RuntimeError: a layer fails.
        """
        found: list[_T] = []
        arrived = self._sample
        for name, layer in self._layers:
            try:
                visited = Visit(layer, arrived, self._device)
                found.append(visit(visited))
            except Exception as error:
                raise RuntimeError(f"{title(name, layer)} cannot be profiled: {error}") from error
            arrived = visited.handed
            self._advance(self._expected * len(self._layers))
        return found

    def times(self) -> list[list[Seconds]]:
        """Every run's, for each layer, in as many rounds as there is time for."""
        if self._timeout is None or not self._layers:
            return [[Seconds(math.nan, math.nan)]] * len(self._layers)
        found: list[list[Seconds]] = [[] for _ in self._layers]
        share = self._timeout / (USUAL_ROUNDS * len(self._layers))
        begun, spent, rounds = perf_counter(), 0.0, 0
        while rounds < LEAST_ROUNDS or spent < self._timeout:
            for times, more in zip(found, self.over(lambda visit: visit.times(share)), strict=True):
                times += more
            rounds, spent = rounds + 1, perf_counter() - begun
            self._expected = 1 + max(LEAST_ROUNDS, math.ceil(rounds * max(1.0, self._timeout / spent)))
        return found

"""Measurement of one layer: runs a copy of the layer on the output of the layers before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from gpipe_fast.layers.skip import Key, carrying, declared
from gpipe_fast.layers.structure import BatchDim, Inputs, Structure, call, flatten


class Handed(NamedTuple):
    """The output of one layer and input of the next: leaves that require gradients where the output does.

    Attributes:
        tensors: the output's tensors, in order.
        structure: the nesting of the tensors.
        waiting: skip tensors that no layer has popped yet.
    """

    tensors: Sequence[Tensor]
    structure: Structure
    waiting: Mapping[Key, Tensor | None]


class Sizes(NamedTuple):
    """Operations and bytes of one run; see `LayerProfile`."""

    flops: int
    parameter_bytes: int
    activation_bytes: int
    boundary_bytes: int


class _Flops(FlopCounterMode):
    """A FLOP counter that counts a nested pipeline as zero, without a warning."""


class Seconds(NamedTuple):
    """The time of one run, in seconds."""

    forward: float
    backward: float


def first_microbatch(sample: Any, chunks: int, device: torch.device, batch_dim: BatchDim = 0) -> Handed:
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
    tensors = inputs.tensors if chunks == 1 else inputs.dims.cut(inputs.tensors, chunks)[0]
    return Handed([_leaf(tensor.to(device)) for tensor in tensors], inputs.structure, {})


class Visit:
    """A copy of a layer in train mode, with its input; it may run any number of times.

    Args:
        layer: the layer to copy; it is not changed.
        arrived: the layer's input; it is not changed.
        device: the device on which the copy runs.

    Attributes:
        handed: the output of the latest run.
    """

    def __init__(self, layer: nn.Module, arrived: Handed, device: torch.device) -> None:
        self._layer = deepcopy(layer).to(device).train()
        for parameter in self._layer.parameters():
            parameter.grad = None
        wanted = set(declared(layer)[1])
        self._popped = {key: x for key, x in arrived.waiting.items() if key in wanted}
        self._arrived, self._device = arrived, device
        self.handed = arrived

    def sizes(self) -> Sizes:
        """Runs the forward, and counts operations and bytes."""
        saved: dict[int, torch.UntypedStorage] = {}  # keeps storages alive so that no address is reused

        def pack(tensor: Tensor) -> Tensor:
            if tensor.layout == torch.strided:
                saved.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
            return tensor

        value, popped = self._inputs()
        with (
            carrying(popped) as stashed,
            _Flops(display=False) as counter,
            saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            output = call(self._layer, value)
        self._hand_on(output, stashed)
        for tensor in chain(self._layer.parameters(), self._layer.buffers()):
            saved.pop(tensor.untyped_storage().data_ptr(), None)
        crossing = [*self.handed.tensors, *(x for x in self.handed.waiting.values() if x is not None)]
        return Sizes(
            counter.get_total_flops(),
            _bytes(self._layer.parameters()),
            sum(storage.nbytes() for storage in saved.values()),
            _bytes(crossing),
        )

    def times(self, seconds: float) -> list[Seconds]:
        """Measures runs for about ``seconds``, at least one.

        An additional first run is discarded: it warms up, and creates the gradients to which the later runs
        add, as do all micro-batches of a mini-batch but one.
        """
        found: list[Seconds] = []
        begun = perf_counter()
        self._time()
        while not found or perf_counter() - begun < seconds:
            found.append(self._time())
        return found

    def _time(self) -> Seconds:
        value, popped = self._inputs()
        with carrying(popped) as stashed:
            begun = self._clock()
            output = call(self._layer, value)
            forward = self._clock() - begun
        needing = [y for y in self._hand_on(output, stashed) if y.requires_grad]
        if not needing:
            return Seconds(forward, 0.0)
        gradients = [torch.ones_like(y) for y in needing]
        begun = self._clock()
        torch.autograd.backward(needing, gradients)
        return Seconds(forward, self._clock() - begun)

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()

    def _inputs(self) -> tuple[Any, dict[Key, Tensor | None]]:
        """Returns copies, which the layer may change, of its argument and of the skip tensors it pops."""
        popped = {key: None if x is None else _leaf(x).clone() for key, x in self._popped.items()}
        return self._arrived.structure.build([_leaf(x).clone() for x in self._arrived.tensors]), popped

    def _hand_on(self, output: Any, stashed: Mapping[Key, Tensor | None]) -> list[Tensor]:
        """Stores the layer's output for the next layer; returns its tensors with their autograd history."""
        tensors, structure = flatten(output, once=True)
        passing = {key: x for key, x in self._arrived.waiting.items() if key not in self._popped}
        waiting = passing | {key: None if x is None else _leaf(x) for key, x in stashed.items()}
        self.handed = Handed([_leaf(x) for x in tensors], structure, waiting)
        return [*tensors, *(x for x in stashed.values() if x is not None)]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

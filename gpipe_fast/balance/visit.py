"""One layer by itself: a copy of it, run on what the layers before hand on, and measured."""

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
    """What one layer hands to the next: leaves, which require gradients where those before did.

    Attributes:
        tensors: in order.
        structure: how they are nested.
        waiting: skip tensors that no layer has popped yet.
    """

    tensors: Sequence[Tensor]
    structure: Structure
    waiting: Mapping[Key, Tensor | None]


class Sizes(NamedTuple):
    """What is counted in one run; for what it means see `LayerProfile`."""

    flops: int
    parameter_bytes: int
    activation_bytes: int
    boundary_bytes: int


class _Flops(FlopCounterMode):
    """Counts a pipeline among the layers as nothing, without a warning."""


class Seconds(NamedTuple):
    """What one run takes."""

    forward: float
    backward: float


def first_microbatch(sample: Any, chunks: int, device: torch.device, batch_dim: BatchDim = 0) -> Handed:
    """What the first layer gets.

    Raises:
        TypeError: there is no tensor in it, or something that is neither a tensor nor a constant.
        ValueError: it is on the meta device, or ``chunks`` is not positive.
    """
    if type(chunks) is not int or chunks < 1:
        raise ValueError(f"number of chunks must be positive integer, got {chunks!r}")
    inputs = Inputs.of((sample,), {}, batch_dim)
    if not inputs.tensors:
        raise TypeError(f"expected Tensor, but got {type(sample).__name__}")
    if any(tensor.is_meta for tensor in inputs.tensors):
        raise ValueError("the sample is on the meta device, where layers do not compute")
    tensors = inputs.tensors if chunks == 1 else inputs.dims.cut(inputs.tensors, chunks)[0]
    return Handed([_leaf(tensor.to(device)) for tensor in tensors], inputs.structure, {})


class Visit:
    """A copy of a layer in train mode, with what reaches it; it may run any number of times.

    Args:
        layer: stays as it is.
        arrived: likewise.
        device: where the copy runs.

    Attributes:
        handed: what the latest run hands on.
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
        """Runs the forward and counts."""
        saved: dict[int, torch.UntypedStorage] = {}  # held, so that no address comes twice

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
        """Runs for about so long, at least once.

        One run more comes first and is dropped: it warms up, and makes the gradients that later ones add to,
        as all micro-batches but one do.
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
        """The layer's argument, and what it pops; all copies, for it may write to them."""
        popped = {key: None if x is None else _leaf(x).clone() for key, x in self._popped.items()}
        return self._arrived.structure.build([_leaf(x).clone() for x in self._arrived.tensors]), popped

    def _hand_on(self, output: Any, stashed: Mapping[Key, Tensor | None]) -> list[Tensor]:
        """Keeps what the layer hands on; returns its tensors with their history."""
        tensors, structure = flatten(output, once=True)
        passing = {key: x for key, x in self._arrived.waiting.items() if key not in self._popped}
        waiting = passing | {key: None if x is None else _leaf(x) for key, x in stashed.items()}
        self.handed = Handed([_leaf(x) for x in tensors], structure, waiting)
        return [*tensors, *(x for x in stashed.values() if x is not None)]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

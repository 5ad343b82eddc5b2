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

from gpipe_fast.layers.skip import Key, declared, skip_scope
from gpipe_fast.layers.structure import BatchDim, Inputs, Structure, call_unpacked, flatten


class LayerOutput(NamedTuple):
    """The output of one layer and input of the next: leaves that require gradients where the output does.

    Attributes:
        tensors: the output's tensors, in order.
        structure: the nesting of the tensors.
        unpopped_skips: skip tensors that no layer has popped yet.
    """

    tensors: Sequence[Tensor]
    structure: Structure
    unpopped_skips: Mapping[Key, Tensor | None]


class LayerSizes(NamedTuple):
    """Operations and bytes of one run; see `LayerProfile`."""

    flops: int
    parameter_bytes: int
    activation_bytes: int
    boundary_bytes: int


class _FlopCounter(FlopCounterMode):
    """A FLOP counter that counts a nested pipeline as zero, without a warning."""


class RunTimes(NamedTuple):
    """The time of one run, in seconds."""

    forward: float
    backward: float


def first_microbatch(sample: Any, chunks: int, device: torch.device, batch_dim: BatchDim = 0) -> LayerOutput:
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
    return LayerOutput([_leaf(tensor.to(device)) for tensor in tensors], inputs.structure, {})


class LayerMeasurement:
    """A copy of a layer in train mode, with its input; it may run any number of times.

    Args:
        layer: the layer to copy; it is not changed.
        layer_input: the layer's input; it is not changed.
        device: the device on which the copy runs.

    Attributes:
        output_of_run: the output of the latest run.
    """

    def __init__(self, layer: nn.Module, layer_input: LayerOutput, device: torch.device) -> None:
        self._layer = deepcopy(layer).to(device).train()
        for parameter in self._layer.parameters():
            parameter.grad = None
        wanted = set(declared(layer)[1])
        self._popped = {key: x for key, x in layer_input.unpopped_skips.items() if key in wanted}
        self._layer_input, self._device = layer_input, device
        self.output_of_run = layer_input

    def sizes(self) -> LayerSizes:
        """Runs the forward, and counts operations and bytes."""
        saved: dict[int, torch.UntypedStorage] = {}  # keeps storages alive so that no address is reused

        def pack(tensor: Tensor) -> Tensor:
            if tensor.layout == torch.strided:
                saved.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
            return tensor

        value, popped = self._inputs()
        with (
            skip_scope(popped) as stashed,
            _FlopCounter(display=False) as counter,
            saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            output = call_unpacked(self._layer, value)
        self._store_output(output, stashed)
        for tensor in chain(self._layer.parameters(), self._layer.buffers()):
            saved.pop(tensor.untyped_storage().data_ptr(), None)
        crossing = [
            *self.output_of_run.tensors,
            *(x for x in self.output_of_run.unpopped_skips.values() if x is not None),
        ]
        return LayerSizes(
            counter.get_total_flops(),
            _bytes(self._layer.parameters()),
            sum(storage.nbytes() for storage in saved.values()),
            _bytes(crossing),
        )

    def times(self, seconds: float) -> list[RunTimes]:
        """Measures runs for about ``seconds``, at least one.

        An additional first run is discarded: it warms up, and creates the gradients to which the later runs
        add, as do all micro-batches of a mini-batch but one.
        """
        found: list[RunTimes] = []
        begun = perf_counter()
        self._time()
        while not found or perf_counter() - begun < seconds:
            found.append(self._time())
        return found

    def _time(self) -> RunTimes:
        value, popped = self._inputs()
        with skip_scope(popped) as stashed:
            begun = self._clock()
            output = call_unpacked(self._layer, value)
            forward = self._clock() - begun
        differentiable = [y for y in self._store_output(output, stashed) if y.requires_grad]
        if not differentiable:
            return RunTimes(forward, 0.0)
        gradients = [torch.ones_like(y) for y in differentiable]
        begun = self._clock()
        torch.autograd.backward(differentiable, gradients)
        return RunTimes(forward, self._clock() - begun)

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()

    def _inputs(self) -> tuple[Any, dict[Key, Tensor | None]]:
        """Returns copies, which the layer may change, of its argument and of the skip tensors it pops."""
        popped = {key: None if x is None else _leaf(x).clone() for key, x in self._popped.items()}
        tensors = [_leaf(x).clone() for x in self._layer_input.tensors]
        return self._layer_input.structure.build(tensors), popped

    def _store_output(self, output: Any, stashed: Mapping[Key, Tensor | None]) -> list[Tensor]:
        """Stores the layer's output for the next layer; returns its tensors with their autograd history."""
        tensors, structure = flatten(output, deduplicate=True)
        passed_on = {key: x for key, x in self._layer_input.unpopped_skips.items() if key not in self._popped}
        unpopped_skips = passed_on | {key: None if x is None else _leaf(x) for key, x in stashed.items()}
        self.output_of_run = LayerOutput([_leaf(x) for x in tensors], structure, unpopped_skips)
        return [*tensors, *(x for x in stashed.values() if x is not None)]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

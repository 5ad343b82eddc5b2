"""The function that a trace runs: a stage's layers as one function of a key and their inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast import progress
from gpipe_fast._extension import Observer
from gpipe_fast.layers.batchnorm import deferring
from gpipe_fast.layers.skip import Key, skip_scope, take_stashed
from gpipe_fast.layers.structure import ONE_TENSOR, Structure, call_unpacked, flatten
from gpipe_fast.randomness.random import KeyedRandomMode
from gpipe_fast.trace import torch_private
from gpipe_fast.trace.gradient_layouts import GradientLayouts, clone_outputs
from gpipe_fast.trace.trace_observer import TraceObserver
from gpipe_fast.trace.triton_calls import pass_launches_through


@dataclass(frozen=True)
class TraceContext:
    """The context of a stage's layers: skip connections into and out of the stage, batch norm mode, device.

    Attributes:
        pops: the skip connections that the layers pop from earlier layers, in their order.
        popped: for each of ``pops``, whether it carries a tensor (else None). Popped tensors are inputs of
            the graph, after the boundary activations.
        stashes: the skip connections that the layers stash for later layers.
        deferred: whether batch norm updates its running statistics once per mini-batch.
        device: the device on which the layers run, with copies of parameters that are on other devices; None
            for the parameters' own devices.
        is_absent: whether to trace for the device without it: no operator runs, and inputs have no memory.
    """

    pops: Sequence[Key] = ()
    popped: Sequence[bool] = ()
    stashes: Sequence[Key] = ()
    deferred: bool = False
    device: torch.device | None = None
    is_absent: bool = False


class UntraceableError(Exception):
    """Raised where layers cannot be traced; the message says why."""


class InvalidStageOutput(UntraceableError):
    """Raised where a stage returns a value that is not made of tensors and constants."""


class InputMutated(Exception):
    """Raised where a layer changes an input in place."""


class _TracingMode(KeyedRandomMode):
    """Draws by key, and pauses the observer inside operators, where a trace spends most of its time."""

    def __init__(self, key: Tensor, observer: Observer, on_gpu: bool) -> None:
        super().__init__(key, on_gpu=on_gpu)
        self._observer = observer

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        with self.unobserved():
            return super().__torch_dispatch__(*args, **kwargs)

    @contextlib.contextmanager
    def unobserved(self) -> Iterator[None]:
        """Pauses the observer."""
        self._observer.pause()
        try:
            yield
        finally:
            self._observer.resume()


pass_launches_through(_TracingMode, _TracingMode.unobserved)


class LayersFunction(nn.Module):
    """The layers as one function of (key, inputs), whose results do not alias each other or an input.

    Attributes:
        output_structure: the nesting of the last layer's outputs; set by `forward`.
        stashed: for each stashed skip connection, whether it carries a tensor; set by `forward`.
        unfused_layers: indices of layers whose attention with dropout runs without a fused kernel on a GPU;
            set by `forward`.
        trace_observer: observes the layers' Python code.
        copy_inputs: whether the inputs are copied, because layers change them in place.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        input_structure: Structure,
        gradient_layouts: GradientLayouts,
        trace_context: TraceContext,
        trace_observer: TraceObserver,
        copy_inputs: bool = False,
    ) -> None:
        super().__init__()
        self.trace_observer = trace_observer
        self.input_structure = input_structure
        self.output_structure = ONE_TENSOR
        self.trace_context = trace_context
        self.stashed: tuple[bool, ...] = ()
        self.unfused_layers: tuple[int, ...] = ()
        self.copy_inputs = copy_inputs
        self.layers = nn.ModuleList(layers)
        self.gradient_layouts = gradient_layouts

    def forward(self, key: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Runs the layers; returns the last layer's outputs, followed by the stashed skip tensors."""
        received = [x.clone() for x in inputs] if self.copy_inputs else list(inputs)
        trace_context = self.trace_context
        num_plain = len(received) - sum(trace_context.popped)
        skip_tensors = iter(received[num_plain:])
        popped = [next(skip_tensors) if is_tensor else None for is_tensor in trace_context.popped]
        with (
            skip_scope(dict(zip(trace_context.pops, popped, strict=True))) as stashed_so_far,
            deferring(trace_context.deferred),
            self.trace_observer.observing() as observer,
        ):
            self.unfused_layers = ()
            value = self._run(key, observer, self.input_structure.build(received[:num_plain]))
            stashed = take_stashed(stashed_so_far, trace_context.stashes)
        self.trace_observer.layer = None
        try:
            outputs, self.output_structure = flatten(value, deduplicate=True)
        except TypeError as error:
            raise InvalidStageOutput(f"the stage returns a value that cannot be passed on: {error}") from None
        self.stashed = tuple(tensor is not None for tensor in stashed)
        return clone_outputs(
            [*outputs, *(tensor for tensor in stashed if tensor is not None)], self.gradient_layouts
        )

    def _run(self, key: Tensor, observer: Observer, value: Any) -> Any:
        for index, layer in enumerate(self.layers):
            self.trace_observer.layer = index
            progress.layer()
            mode = _TracingMode(key, observer, self.trace_context.is_absent)
            mode.enter_layer(index)
            tensors_before = _named_tensors(layer)
            with mode, torch_private.annotate({"layer": index}):
                value = call_unpacked(layer, value)
            self.trace_observer.leave_layer()
            if mode.unfused_attention:
                self.unfused_layers = (*self.unfused_layers, index)
            for name, tensor in _named_tensors(layer).items():
                if tensors_before.get(name) is not tensor:
                    raise UntraceableError(
                        f"its forward replaces the buffer or parameter {name.lstrip('.')}, a side effect"
                    )
        return value


def _named_tensors(layer: nn.Module) -> dict[str, Tensor | None]:
    return {
        f"{prefix}.{key}": tensor
        for prefix, module in layer.named_modules()
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
    }

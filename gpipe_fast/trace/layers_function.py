"""The function that a trace runs: a stage's layers as one function of a key and their inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast.layers.quantized import is_wrapper, parts_of
from gpipe_fast.layers.sharded import is_sharded
from gpipe_fast.layers.structure import ONE_TENSOR, Structure, arguments_of, flatten
from gpipe_fast.randomness.random import KeyedRandomMode
from gpipe_fast.skip import Key, outer_skips, take_stashed
from gpipe_fast.strides import empty_like
from gpipe_fast.torch_private.fake_tensors import is_traced
from gpipe_fast.torch_private.graphs import annotate
from gpipe_fast.trace.capture_layers import FindState
from gpipe_fast.trace.dynamo import Captured, ReplaceConstant
from gpipe_fast.trace.gradient_layouts import GradientLayouts, clone_outputs
from gpipe_fast.trace.interrupts import handle_interrupt
from gpipe_fast.trace.layer_states import LayerStates
from gpipe_fast.trace.traceability import Untraceable


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
        find_state: returns the state of a layer with a given description, which keeps captures for other
            traces.
    """

    pops: Sequence[Key] = ()
    popped: Sequence[bool] = ()
    stashes: Sequence[Key] = ()
    deferred: bool = False
    device: torch.device | None = None
    is_absent: bool = False
    find_state: FindState = field(default_factory=lambda: _states_without_modes())


def _states_without_modes() -> FindState:
    states = LayerStates()
    return lambda layer, description: states.of(layer, description, None)


class InputMutated(Exception):
    """Raised where a layer changes an input in place."""


class LayersFunction(nn.Module):
    """The layers as one function of (key, inputs), whose results do not alias each other or an input.

    Attributes:
        output_structure: the nesting of the last layer's outputs; set by `forward`.
        stashed: for each stashed skip connection, whether it carries a tensor; set by `forward`.
        unfused_layers: indices of layers whose attention with dropout runs without a fused kernel on a GPU;
            set by `forward`.
        running_layer: index of the layer whose graph is running; None between layers.
        copy_inputs: whether the inputs are copied, because layers change them in place.
        written_inputs: the inputs that layers change in place; set by `forward`.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        input_structure: Structure,
        gradient_layouts: GradientLayouts,
        trace_context: TraceContext,
        captures: Sequence[Captured],
        replace: ReplaceConstant,
        copy_inputs: bool,
    ) -> None:
        super().__init__()
        self.running_layer: int | None = None
        self._captures = captures
        self._replace = replace
        self.input_structure = input_structure
        self.output_structure = ONE_TENSOR
        self.trace_context = trace_context
        self.stashed: tuple[bool, ...] = ()
        self.unfused_layers: tuple[int, ...] = ()
        self.copy_inputs = copy_inputs
        self.written_inputs: tuple[int, ...] = ()
        self.layers = nn.ModuleList(layers)
        self.gradient_layouts = gradient_layouts
        self._quantized = quantized_in(layers)
        self._parts: dict[int, str] = {}
        for index, part in enumerate(attribute_parts(layers)):
            self._parts.setdefault(id(part), f"part_{index}")
            self.register_buffer(f"part_{index}", part)

    def forward(self, key: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Runs the layers; returns the last layer's outputs, followed by the stashed skip tensors."""
        received = [empty_like(x).copy_(x) for x in inputs] if self.copy_inputs else list(inputs)
        # Tensors of inference mode have no version: any of the copies may have been changed.
        versions = [None if x.is_inference() else x._version for x in received]
        trace_context = self.trace_context
        num_plain = len(received) - sum(trace_context.popped)
        skips = skips_from(trace_context, received[num_plain:])
        self.unfused_layers = ()
        value = self._run(key, self.input_structure.build(received[:num_plain]), skips)
        self.written_inputs = tuple(
            i
            for i, (x, version) in enumerate(zip(received, versions, strict=True))
            if (self.copy_inputs if version is None else x._version != version)
        )
        stashed = take_stashed(skips, trace_context.stashes)
        try:
            outputs, self.output_structure = flatten(value, deduplicate=True)
        except TypeError as error:
            reason = f"the stage returns a value that cannot be passed on: {error}"
            raise Untraceable(None, reason, error=TypeError) from None
        self.stashed = tuple(tensor is not None for tensor in stashed)
        sent = [*outputs, *(tensor for tensor in stashed if tensor is not None)]
        if any(map(is_sharded, sent)):
            raise Untraceable(
                None,
                "the stage returns a DTensor, and stages pass on local tensors; let the last layer return "
                "output.to_local(), or give its style use_local_output=True",
                error=TypeError,
            )
        return clone_outputs(sent, self.gradient_layouts)

    def _run(self, key: Tensor, value: Any, skips: dict[Key, Tensor | None]) -> Any:
        for module, name, original in self._quantized:  # the trace has replaced the parameter
            vars(module._parameters[name]).update(vars(original))
        for index, (layer, captured) in enumerate(zip(self.layers, self._captures, strict=True)):
            self.running_layer = index
            handle_interrupt()
            mode = KeyedRandomMode(key, on_gpu=self.trace_context.is_absent)
            mode.enter_layer(index)
            args, kwargs = arguments_of(value)
            stashes, pops = outer_skips(layer)
            with mode, annotate({"layer": index}):
                popped = take_stashed(skips, pops)
                value, stashed = captured.run(layer, args, kwargs, popped, self._replaced)
            skips.update(zip(stashes, stashed, strict=True))
            if mode.unfused_attention:
                self.unfused_layers = (*self.unfused_layers, index)
        self.running_layer = None
        return value

    def _replaced(self, tensor: Tensor) -> Tensor:
        """Returns the tensor to compute with in place of a constant, or of part of a quantized parameter."""
        part = self._parts.get(id(tensor))
        if part is not None:
            found: Tensor = self._buffers[part]  # type: ignore[assignment]
            return found
        return tensor if is_traced(tensor) else self._replace(tensor)


def skips_from(trace_context: TraceContext, tensors: Sequence[Tensor]) -> dict[Key, Tensor | None]:
    """Returns the skip tensors that a stage pops from earlier stages, by key."""
    left = iter(tensors)
    popped = [next(left) if is_tensor else None for is_tensor in trace_context.popped]
    return dict(zip(trace_context.pops, popped, strict=True))


def quantized_in(layers: Iterable[nn.Module]) -> list[tuple[nn.Module, str, Tensor]]:
    """Returns the quantized parameters that are no wrappers, each with its module and its name there."""
    return [
        (module, name, parameter)
        for layer in layers
        for module in layer.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and not is_wrapper(parameter) and parts_of(parameter)
    ]


def attribute_parts(layers: Iterable[nn.Module]) -> list[Tensor]:
    """Returns the parts of those parameters."""
    return [part for _, _, parameter in quantized_in(layers) for part in parts_of(parameter).values()]

"""Traces equal layers of a stage once: it traces parts of the stage, and joins their graphs.

Each layer that occurs several times is a part; so is each run of other layers between them::

    layers    embed   block 0   block 1   block 2   norm   head
    parts     ──0──   ───1───   ───1───   ───1───   ─────2─────    three traces
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from gpipe_fast import progress, switches
from gpipe_fast.layers.structure import Structure
from gpipe_fast.runtime.cache import Cache
from gpipe_fast.runtime.plan_log import layers_title, log_graph
from gpipe_fast.runtime.stage import BoundarySpec, Stage, TorchModes, outputs_of
from gpipe_fast.trace.gradient_layouts import GradientLayouts
from gpipe_fast.trace.join import join
from gpipe_fast.trace.joint_graph import GraphRole, JointGraph, buffers_of, parameters_of
from gpipe_fast.trace.ports import TracedPorts
from gpipe_fast.trace.torch_private import Symbols
from gpipe_fast.trace.trace import SymbolicMode, trace, trace_in_mode, trace_symbolic
from gpipe_fast.trace.traceability import Untraceable, UsesForeignTensor

# Each trace has a fixed cost: layers with fewer modules are traced together with their neighbours.
_MIN_MODULES = 4

# The maximum number of kinds of parts that one symbolic trace of a stage keeps.
_MAX_SYMBOLIC_PARTS = 128

_Boundary = TypeVar("_Boundary")
Traced = JointGraph | Untraceable


def parts_of(stage: Stage) -> list[Stage]:
    """Returns the parts of a stage that are traced one by one; the stage itself if that does not pay.

    It is traced as a whole, too, if parts share parameters, whose gradients would be added in another order,
    if they share the memory of buffers, or if a skip connection leads from one part to another.
    """
    if stage.options.is_absent or switches.is_disabled("equal-layers"):
        return [stage]
    keys = [_key_of(stage.part(i, i + 1)) for i in range(len(stage.layers))]
    numbers = Counter(key for key in keys if key is not None)
    cuts = {0, len(keys)}
    for index, key in enumerate(keys):
        if numbers[key] > 1:
            cuts |= {index, index + 1}
    parts = [stage.part(begin, end) for begin, end in itertools.pairwise(sorted(cuts))]
    share_tensors = any(
        sum(len(tensors(part)) for part in parts) != len(tensors(stage))
        for tensors in (Stage.parameters, Stage.buffers)
    )
    if share_tensors or stage.skips or _share_memory_of_buffers(parts):
        return [stage]
    return parts


def _share_memory_of_buffers(parts: Sequence[Stage]) -> bool:
    """Returns whether a buffer of one part is in the same memory as a buffer or parameter of another."""
    owners: dict[int, int] = {}
    for index, part in enumerate(parts):
        if any(owners.setdefault(memory, index) != index for memory in _memory_of(buffers_of(part.layers))):
            return True
    return any(
        owners.get(memory, index) != index
        for index, part in enumerate(parts)
        for memory in _memory_of(parameters_of(part.layers))
    )


def _memory_of(tensors: Iterable[Tensor]) -> set[int]:
    """Returns the addresses of storages. Tensor subclasses are left out, because they are not traced."""
    strided = (t for t in tensors if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided)
    return {t.untyped_storage().data_ptr() for t in strided} - {0}


def _key_of(layer: Stage) -> Hashable:
    """Returns a key that is equal for layers that may be equal; None for a layer that is cheap to trace."""
    if sum(1 for _ in layer.layers[0].modules()) < _MIN_MODULES:
        return None
    return layer.state_key(TorchModes.now())


class _Tracer(Protocol[_Boundary]):
    """Traces parts of a stage for boundary activations of some kind."""

    def trace(self, part: Stage, inputs: _Boundary, gradient_layouts: GradientLayouts) -> Traced:
        """Traces a part, or returns the graph of an equal part."""

    def outputs(self, joint: JointGraph) -> _Boundary:
        """Returns the outputs of a part, as inputs of the next."""


def _trace_parts(
    parts: Sequence[Stage], inputs: _Boundary, gradient_layouts: GradientLayouts, tracer: _Tracer[_Boundary]
) -> Traced:
    """Traces parts forwards for their inputs, then backwards for the layouts of their gradients."""
    joints: list[JointGraph] = []
    boundaries = [inputs]
    for part in parts:
        joint = tracer.trace(part, boundaries[-1], ())
        if isinstance(joint, Untraceable):
            return _shifted(joint, part.first_layer - parts[0].first_layer)
        joints.append(joint)
        boundaries.append(tracer.outputs(joint))
    if _refer_to_each_other(parts, joints):
        return Untraceable(None, "a layer uses a buffer of another")
    for index in reversed(range(len(parts))):
        if gradient_layouts:
            joint = tracer.trace(parts[index], boundaries[index], gradient_layouts)
            if isinstance(joint, Untraceable):
                return _shifted(joint, parts[index].first_layer - parts[0].first_layer)
            joints[index] = joint
        if index:
            before, after = (TracedPorts.of_graph(joints[i]) for i in (index - 1, index))
            gradient_layouts = before.gradient_layouts(after.input_gradient_strides())
    if any(joint.writes_inputs for joint in joints[1:]):
        return Untraceable(None, "a layer changes the output of another in place")
    return join(joints, [(len(part.parameters()), len(part.buffers())) for part in parts])


def _refer_to_each_other(parts: Sequence[Stage], joints: Iterable[JointGraph]) -> bool:
    """Returns whether a buffer of one part is a constant in the graph of another, which misses its writes."""
    constants = [
        getattr(joint.module, str(node.target))
        for joint in joints
        for node in joint.module.graph.find_nodes(op="get_attr")
    ]
    return bool(constants) and not _memory_of(constants).isdisjoint(
        memory for part in parts for memory in _memory_of(buffers_of(part.layers))
    )


def _shifted(untraceable: Untraceable, num_layers: int) -> Untraceable:
    if untraceable.layer is None:
        return untraceable
    return replace(untraceable, layer=untraceable.layer + num_layers)


class _KnownParts:
    """The graphs of traced parts, for all parts in the same state."""

    def __init__(self, limit: int) -> None:
        self._known: Cache[Hashable, tuple[JointGraph, str]] = Cache(limit)

    def find(self, part: Stage, key: Hashable, trace_part: Callable[[], Traced]) -> Traced:
        """Returns the graph of an equal part under the same key, or traces the part."""
        modes = TorchModes.now()
        known = self._known.find((part.state_key(modes), key))
        if known is not None:
            joint, origin = known
            log_graph(part, f"reused the graph of {origin}")
            return joint
        found = trace_part()
        if isinstance(found, JointGraph):
            # With the guards of these captures.
            self._known[part.state_key(modes), key] = found, layers_title(part)
        return found

    def graphs(self) -> list[JointGraph]:
        """Returns the graphs."""
        return [joint for _, (joint, _) in self._known.entries()]

    def forget_oldest(self) -> bool:
        """Removes the least recently used kind of parts; returns whether there was one."""
        if not self._known:
            return False
        self._known.popitem(last=False)
        return True


class EqualLayers:
    """Traces stages; keeps the graphs of their parts for other stages, and for other gradient layouts."""

    def __init__(self, limit: int) -> None:
        """Makes a tracer that keeps the graphs of at most `limit` kinds of parts."""
        self._known = _KnownParts(limit)
        self.graphs = self._known.graphs
        self.forget_oldest = self._known.forget_oldest

    def trace_stage(self, stage: Stage, inputs: BoundarySpec, gradient_layouts: GradientLayouts) -> Traced:
        """Traces a stage under the calling thread's modes.

        Args:
            stage: the layers to trace.
            inputs: the specs of the stage's inputs.
            gradient_layouts: the outputs whose gradients arrive in another layout than the output's, or not
                at all.
        """
        parts = parts_of(stage)
        if len(parts) > 1:
            found = _trace_parts(parts, inputs, gradient_layouts, self)
            if not _may_be_joined_only(found):
                return found
        return _trace_part(stage, inputs, gradient_layouts)

    def trace(self, part: Stage, inputs: BoundarySpec, gradient_layouts: GradientLayouts) -> Traced:
        """Traces a part of a stage, or returns the graph of an equal part."""
        key = (inputs, gradient_layouts, TorchModes.now(), part.device, part.options.deferred)
        return self._known.find(part, key, lambda: _trace_part(part, inputs, gradient_layouts))

    def outputs(self, joint: JointGraph) -> BoundarySpec:
        """Returns the specs of a part's outputs."""
        return outputs_of(TracedPorts.of_graph(joint))


def _trace_part(part: Stage, inputs: BoundarySpec, gradient_layouts: GradientLayouts) -> Traced:
    log_graph(part, "traced", inputs)
    progress.step("tracing", part.first_layer, len(part.layers))
    return trace(
        part.layers,
        inputs.examples(part.options.is_absent),
        gradient_layouts,
        inputs.structure,
        part.trace_context(inputs),
    )


def _may_be_joined_only(found: Traced) -> bool:
    """Returns whether the layers may be traceable as a whole, though not in parts.

    Between layers of a whole, values may pass that no stage could pass on, and a layer may change another's
    output in place, or refer to another's parameters and buffers.
    """
    if isinstance(found, UsesForeignTensor):
        return True
    return isinstance(found, Untraceable) and (found.error is TypeError or found.layer is None)


@dataclass(frozen=True)
class _SymbolicBoundary:
    """Boundary activations with symbols for sizes."""

    tensors: tuple[Tensor, ...]
    structure: Structure

    def key(self) -> Hashable:
        """Returns a key that is equal for tensors that a trace cannot tell apart."""
        return (self.structure, *map(_symbolic_key, self.tensors))


def _symbolic_key(tensor: Tensor) -> Hashable:
    def expressions(sizes: Sequence[int | torch.SymInt]) -> tuple[Hashable, ...]:
        return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)

    sizes, strides = expressions(tensor.shape), expressions(tensor.stride())
    return sizes, strides, tensor.dtype, tensor.device, tensor.requires_grad


class _SymbolicTracer:
    """Traces the parts of one stage with the same symbols."""

    def __init__(self, mode: SymbolicMode) -> None:
        self._mode = mode
        self._known = _KnownParts(_MAX_SYMBOLIC_PARTS)

    def trace(self, part: Stage, inputs: _SymbolicBoundary, gradient_layouts: GradientLayouts) -> Traced:
        """Traces a part of the stage, or returns the graph of an equal part."""
        context = part.trace_context(BoundarySpec(()))

        def trace_part() -> Traced:
            progress.step("tracing", part.first_layer, len(part.layers))
            return trace_in_mode(
                part.layers, inputs.tensors, gradient_layouts, inputs.structure, context, self._mode
            )

        return self._known.find(part, (inputs.key(), gradient_layouts), trace_part)

    def outputs(self, joint: JointGraph) -> _SymbolicBoundary:
        """Returns fake tensors like a part's outputs."""
        nodes, differentiable = joint.of(GraphRole.OUTPUT), joint.differentiable_outputs()
        tensors: list[Tensor] = []
        for index in range(len(nodes)):
            value = nodes[index].meta["val"]
            with self._mode.mode:
                like = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )
            tensors.append(like.requires_grad_(index in differentiable))
        return _SymbolicBoundary(tuple(tensors), joint.structure)


def trace_stage_symbolic(
    stage: Stage, inputs: BoundarySpec, gradient_layouts: GradientLayouts, varying: Sequence[Sequence[bool]]
) -> tuple[JointGraph, Symbols] | None:
    """Traces a stage with symbols for sizes; equal layers once.

    Args:
        stage: the layers to trace.
        inputs: the specs of the stage's inputs.
        gradient_layouts: as for `EqualLayers.trace_stage`.
        varying: for each size of each input, whether it is a symbol.

    Returns:
        The graph and its symbols; None if the stage cannot be traced, or if a size depends on data.
    """
    parts = parts_of(stage)
    if len(parts) > 1:
        mode = SymbolicMode(inputs.examples(), varying)
        boundary = _SymbolicBoundary(tuple(mode.inputs), inputs.structure)
        joint = _trace_parts(parts, boundary, gradient_layouts, _SymbolicTracer(mode))
        symbols = mode.symbols()
        if symbols is not None and isinstance(joint, JointGraph):
            return joint, symbols
    return trace_symbolic(
        stage.layers,
        inputs.examples(),
        gradient_layouts,
        inputs.structure,
        stage.trace_context(inputs),
        varying,
    )

"""Traces equal layers of a stage once: it traces parts of the stage, and joins their graphs.

Each layer that occurs several times is a part; so is each run of other layers between them, and the loss of a
step, so that calls and steps with other losses share the graphs of the layers before::

    layers    embed   block 0   block 1   block 2   norm   head   loss
    parts     ──0──   ───1───   ───1───   ───1───   ─────2─────   ──3──    four traces
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpipe_fast import progress, switches
from gpipe_fast.layers.structure import Structure
from gpipe_fast.lower.ladder import is_backward
from gpipe_fast.runtime.cache import Cache
from gpipe_fast.runtime.module_warnings import layers_title, log_graph
from gpipe_fast.runtime.stage import BoundarySpec, Stage, TorchModes
from gpipe_fast.trace.capture_layers import key_of_fake
from gpipe_fast.trace.gradient_layouts import GradientLayouts
from gpipe_fast.trace.join import join
from gpipe_fast.trace.joint_graph import GraphRole, JointGraph, buffers_of, parameters_of
from gpipe_fast.trace.symbols import TraceMode
from gpipe_fast.trace.trace import trace
from gpipe_fast.trace.traceability import Untraceable, UsesForeignTensor

# Each trace has a fixed cost: layers with fewer modules are traced together with their neighbours.
_MIN_MODULES = 4


def parts_of(stage: Stage) -> list[Stage]:
    """Returns the parts of a stage that are traced one by one; the stage itself if that does not pay.

    It is traced as a whole, too, if parts share parameters, whose gradients would be added in another order,
    if they share the memory of buffers, or if a skip connection leads from one layer to another.
    """
    if stage.options.is_absent or switches.is_disabled("equal-layers"):
        return [stage]
    keys = [_key_of(stage.part(i, i + 1)) for i in range(len(stage.layers))]
    numbers = Counter(key for key in keys if key is not None)
    cuts = {0, len(keys)}
    for index, key in enumerate(keys):
        if numbers[key] > 1:
            cuts |= {index, index + 1}
    if stage.has_loss:
        cuts.add(len(keys) - 1)
    parts = [stage.part(begin, end) for begin, end in itertools.pairwise(sorted(cuts))]
    share_tensors = any(
        sum(len(tensors(part)) for part in parts) != len(tensors(stage))
        for tensors in (Stage.parameters, Stage.buffers)
    )
    if share_tensors or any(skip.source >= 0 for skip in stage.skips) or _buffers_share_memory(stage.layers):
        return [stage]
    return parts


def _buffers_share_memory(layers: Sequence[nn.Module]) -> bool:
    """Returns whether a buffer is in the same memory as another buffer or a parameter."""
    numbers = Counter(_addresses([*parameters_of(layers), *buffers_of(layers)]))
    return any(numbers[address] > 1 for address in _addresses(buffers_of(layers)))


def layers_share_memory(layers: Sequence[nn.Module]) -> bool:
    """Returns whether parameters or buffers of layers are in the same memory."""
    addresses = _addresses([*parameters_of(layers), *buffers_of(layers)])
    return len(set(addresses)) < len(addresses)


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Returns the addresses of storages. Tensor subclasses are left out, because they are not traced."""
    strided = (t for t in tensors if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided)
    return [address for t in strided if (address := t.untyped_storage().data_ptr())]


def _key_of(layer: Stage) -> Hashable:
    """Returns a key that is equal for layers that may be equal; None for a layer that is cheap to trace."""
    if sum(1 for _ in layer.layers[0].modules()) < _MIN_MODULES:
        return None
    return layer.state_key(TorchModes.now())


class FakeInputs(NamedTuple):
    """The inputs of layers in a trace.

    Attributes:
        mode: the fake mode.
        tensors: fake tensors of the mode; skip tensors last.
        structure: how the tensors other than skip tensors are nested.
        skips: whether each skip connection that the layers pop carries a tensor.
    """

    mode: TraceMode
    tensors: Sequence[Tensor]
    structure: Structure
    skips: tuple[bool, ...] = ()

    @classmethod
    def of(cls, inputs: BoundarySpec, is_absent: bool) -> FakeInputs:
        """Returns the inputs for specs, in a new mode without symbols."""
        mode = TraceMode(is_absent)
        tensors = [mode.empty(s.meta_tensor(), s.device, s.requires_grad) for s in inputs.tensors]
        return cls(mode, tensors, inputs.structure, inputs.skips)

    def of_part(self, part: Stage, joint: JointGraph | None) -> FakeInputs:
        """Returns the inputs of a part of the stage that has these inputs.

        Args:
            part: the part; the last one pops all skip tensors.
            joint: the graph of the part before; None for the first part.
        """
        skips = self.skips if part.pops else ()
        popped = self.tensors[len(self.tensors) - sum(skips) :] if skips else []
        if joint is None:
            plain = self.tensors[: len(self.tensors) - sum(self.skips)]
            return FakeInputs(self.mode, [*plain, *popped], self.structure, skips)
        nodes, differentiable = joint.of(GraphRole.OUTPUT), joint.ports.differentiable_outputs()
        values = [nodes[index].meta["val"] for index in range(len(nodes))]
        tensors = [self.mode.empty(x, x.device, index in differentiable) for index, x in enumerate(values)]
        return FakeInputs(self.mode, [*tensors, *popped], joint.structure, skips)

    def key(self) -> Hashable:
        """Returns a key that is equal for inputs that a trace in the same mode cannot tell apart."""
        return (self.structure, self.skips, *map(key_of_fake, self.tensors))


# The graphs of traced parts, for all parts in the same state, and the layers they were made for.
PartGraphs = Cache[Hashable, tuple[JointGraph, str]]


def trace_stage(
    stage: Stage, inputs: FakeInputs, gradient_layouts: GradientLayouts, known: PartGraphs
) -> JointGraph:
    """Traces a stage under the calling thread's modes: equal layers once, if their graphs can be joined.

    Args:
        stage: the layers to trace.
        inputs: the stage's inputs.
        gradient_layouts: the outputs whose gradients arrive in another layout than the output's, or not
            at all.
        known: the graphs of parts that are traced already; if sizes are symbols, in the same mode.

    Raises:
        Untraceable: a layer cannot be traced.
    """
    parts, layouts = parts_of(stage), gradient_layouts
    joints: list[JointGraph] = []
    boundaries: list[FakeInputs] = []
    part = stage
    if len(parts) == 1:
        reused = None if switches.is_disabled("equal-layers") else known
        return _trace_part(stage, inputs, gradient_layouts, reused)
    try:
        for part in parts:
            boundaries.append(inputs.of_part(part, joints[-1] if joints else None))
            joints.append(_trace_part(part, boundaries[-1], (), known))
        for index in reversed(range(len(parts))):
            part = parts[index]
            if layouts:
                joints[index] = _trace_part(part, boundaries[index], layouts, known)
            if index:
                before, after = (joints[i].ports for i in (index - 1, index))
                layouts = before.gradient_layouts(after.input_gradient_layouts())
    except Untraceable as error:
        if error.layer is not None:
            error.layer += part.first_layer - stage.first_layer
        if not _may_be_traced_as_a_whole(error):
            raise
    else:
        if not _depend_on_each_other(parts, joints):
            return join(joints, [(len(part.parameters()), len(part.buffers())) for part in parts])
    return _trace_part(stage, inputs, gradient_layouts, None)


def _trace_part(
    part: Stage, inputs: FakeInputs, gradient_layouts: GradientLayouts, known: PartGraphs | None
) -> JointGraph:
    """Traces a part of a stage, or returns the graph of an equal part."""
    modes = TorchModes.now()
    key = (inputs.key(), gradient_layouts, modes, part.traced_device, part.options.deferred)
    found = None if known is None else known.lookup((part.state_key(modes), key))
    if found is not None:
        log_graph(part, f"reused the graph of {found[1]}")
        return found[0]
    log_graph(part, "traced", inputs.tensors)
    progress.step("tracing", part.first_layer, len(part.layers))
    context = part.trace_context(inputs.skips)
    joint = trace(part.layers, inputs.tensors, gradient_layouts, inputs.structure, context, inputs.mode)
    if known is not None:
        known[part.state_key(modes), key] = joint, layers_title(part)  # with the guards of these captures
    return joint


def _depend_on_each_other(parts: Sequence[Stage], joints: Sequence[JointGraph]) -> bool:
    """Returns whether a part changes another's output in place or reads around it, or uses another's buffer.

    A buffer of another part is a constant in a graph, which would miss its writes.
    """
    constants = [
        getattr(joint.module, str(node.target))
        for joint in joints
        for node in joint.module.graph.find_nodes(op="get_attr")
    ]
    memory = {address for part in parts for address in _addresses(buffers_of(part.layers))}
    uses_other = any(joint.written_inputs or _reads_whole_memory(joint) for joint in joints[1:])
    return uses_other or not memory.isdisjoint(_addresses(constants))


def _reads_whole_memory(joint: JointGraph) -> bool:
    """Returns whether a layer may read the memory around a view, from an offset that it gives."""
    nodes = joint.module.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
    return any(len(node.args) > 3 and not is_backward(node) for node in nodes)


def _may_be_traced_as_a_whole(reason: Untraceable) -> bool:
    """Returns whether the layers may be traceable as a whole, though not in parts.

    Between layers of a whole, values may pass that no stage could pass on, and a layer may change another's
    output in place, or refer to another's parameters and buffers.
    """
    return isinstance(reason, UsesForeignTensor) or reason.error is TypeError or reason.layer is None

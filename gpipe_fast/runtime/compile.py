"""The compiler: from stages and boundary specs to compiled stages. Equal stages are traced only once.

It traces, or derives graphs from templates. A compiled stage is lowered later, once a plan asks for a segment
of it (`CompiledStage.segment`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpipe_fast.fuse.availability import fusion_of, with_user_launches
from gpipe_fast.lower.accumulation import AccumulationPolicy
from gpipe_fast.lower.program_template import ProgramTemplates
from gpipe_fast.runtime.cache import NODE_BYTES, VALUE_BYTES, Cache
from gpipe_fast.runtime.compiled import (
    ArrivingLayouts,
    CompiledStage,
    GradientLayoutHistory,
    SegmentKey,
    TracedStage,
)
from gpipe_fast.runtime.equal_layers import FakeInputs, PartGraphs, layers_share_memory, trace_stage
from gpipe_fast.runtime.module_warnings import layers_title, log_graph
from gpipe_fast.runtime.shape_families import ShapeFamily, family_key
from gpipe_fast.runtime.stage import BoundarySpec, Stage, TensorSpec, TorchModes, given_skips
from gpipe_fast.trace.gradient_layouts import GradientLayout, GradientLayouts
from gpipe_fast.trace.joint_graph import JointGraph
from gpipe_fast.trace.layer_states import LayerState, StateKey
from gpipe_fast.trace.symbolic import Instance
from gpipe_fast.trace.traceability import Untraceable

_Spec = TypeVar("_Spec", TensorSpec, TensorSpec | None)
# The maximum number of kinds of equal layers whose graphs are kept for other stages.
_MAX_PARTS = 32
# The maximum number of traces that are kept; the least recently used are dropped.
_MAX_CACHED = 128
# The maximum number of traces of a stage, for shapes or constants that no template covers.
MAX_TRACES = 64


class TooManyTraces(Untraceable):
    """Raised in place of a trace of a stage that has been traced for too many shapes or constants already."""


class Compiler:
    """A compiler of pipelines, with caches of traces, templates and compiled stages.

    Attributes:
        num_traces: the number of traces so far.
        num_instantiated: the number of graphs written out from a template instead of traced.
    """

    def __init__(self, max_traces: int | None = None) -> None:
        """Makes a compiler with empty caches.

        Args:
            max_traces: the maximum number of traces without symbols of one stage in equal modes; None for no
                limit.
        """
        self.num_traces = self.num_instantiated = 0
        self._max_traces = max_traces
        self._trace_counts: Cache[tuple[Hashable, TorchModes], int] = Cache(_MAX_CACHED)
        self._parts = PartGraphs(_MAX_PARTS)
        # The states of stages until a trace adds guards, in the state of all layers.
        self._known: tuple[StateKey | None, dict[tuple[Stage, TorchModes, int], StateKey]] = (None, {})
        self._traces: Cache[Hashable, TracedStage] = Cache(_MAX_CACHED)
        self._families: Cache[tuple[Hashable, Hashable, TorchModes], ShapeFamily] = Cache(_MAX_CACHED)
        self._compiled: Cache[tuple[SegmentKey, GradientLayouts], CompiledStage] = Cache(4 * _MAX_CACHED)

    def compile(
        self,
        stages: Sequence[Stage],
        microbatches: Sequence[BoundarySpec],
        layout_history: GradientLayoutHistory | None = None,
        cat_dim: int = 0,
        state: StateKey | None = None,
    ) -> list[list[CompiledStage]]:
        """Compiles all stages for each micro-batch of a mini-batch, under the calling thread's modes.

        The caller has left inference mode, as by `outside_inference_mode`.

        Args:
            stages: the pipeline.
            microbatches: the inputs of the first stage for each micro-batch, and the skip tensors that the
                caller gives; only the last may differ.
            layout_history: the history of gradient layouts; None if every boundary gradient arrives in the
                layout of its boundary activation.
            cat_dim: the dimension along which outputs are joined.
            state: the state of all layers; as long as it is one object, those of stages are found once.

        Raises:
            Untraceable: a stage cannot be compiled; it names the stage and the layer.
        """
        pipelines: list[list[CompiledStage]] = []
        for inputs in dict.fromkeys((microbatches[0], microbatches[-1])):
            compiled: list[CompiledStage] = []
            first, given = inputs.split_skips()
            stashed: dict[int, tuple[TensorSpec | None, Stage]] = {
                number: (spec, stages[-1]) for number, spec in zip(given_skips(stages), given, strict=True)
            }
            for index, stage in enumerate(stages):
                received = _received(compiled[-1], stage) if compiled else first
                skips = [at_receiver(*stashed.pop(number), stage) for number in stage.pops]
                modes = TorchModes.now()
                layers = self._state_key(stage, modes, state)
                segment_key = SegmentKey.of(stage, received.with_skips(skips), modes, layers)
                try:
                    compiled.append(self.compiled(stage, segment_key))
                except Untraceable as error:
                    error.stage = index
                    if not isinstance(error, TooManyTraces):
                        error.layer = self.blamed(stage, segment_key.input_specs, error)
                    raise
                _, sent = compiled[-1].outputs.split_skips()
                stashed.update({n: (spec, stage) for n, spec in zip(stage.stashes, sent, strict=True)})
            pipelines.append(compiled)
        if layout_history is not None:
            outputs = [compiled[-1].outputs.tensors for compiled in pipelines]
            joined = _joined_strides(outputs, cat_dim, len(microbatches))
            for number, gradients in enumerate(joined):
                pipelines[number] = self._compile_for_gradients(pipelines[number], gradients, layout_history)
        return [pipelines[0]] * (len(microbatches) - 1) + [pipelines[-1]]

    def _state_key(self, stage: Stage, modes: TorchModes, state: StateKey | None) -> StateKey:
        if state is None or state is not self._known[0]:
            self._known = state, {}
        key, known = (stage, modes, stage.states.version), self._known[1]
        if key not in known:
            known[key] = stage.state_key(modes)
        return known[key]

    def _compile_for_gradients(
        self,
        compiled: Sequence[CompiledStage],
        gradients: ArrivingLayouts,
        layout_history: GradientLayoutHistory,
    ) -> list[CompiledStage]:
        """Propagates gradient layouts from the last stage to the first, and compiles each stage for them."""
        found = list(compiled)
        skip_gradients: dict[int, GradientLayout] = {}
        for index, base in reversed(list(enumerate(compiled))):
            stashes = _skip_tensors(base.stage.stashes, base.outputs)
            gradients.update(
                {position: skip_gradients[number] for position, number in stashes if number in skip_gradients}
            )
            arriving = layout_history.lookup(base.segment_key) or gradients
            try:
                found[index] = self.compiled(base.stage, base.segment_key, arriving)
            except Untraceable as error:
                error.stage = index
                error.layer = len(base.stage.layers) - 1 if error.layer is None else error.layer
                raise
            gradients = found[index].traced.ports.input_gradient_layouts()
            for position, number in _skip_tensors(base.stage.pops, base.inputs):
                if position in gradients:
                    skip_gradients[number] = gradients.pop(position)
        return found

    def compiled(
        self,
        part: Stage,
        segment_key: SegmentKey,
        gradients: ArrivingLayouts | None = None,
        enforce_limit: bool = True,
    ) -> CompiledStage:
        """Returns a compiled stage or part of a stage. The calling thread's modes must equal the key's.

        Args:
            part: the layers to compile.
            segment_key: the segment key to compile them for.
            gradients: the layouts of the outputs' gradients; None for the outputs' own layouts.
            enforce_limit: whether the limit on traces applies.

        Raises:
            Untraceable: the layers cannot be traced.
        """
        base = self._compiled.lookup((segment_key, ()))
        if base is None:
            num_traces = self.num_traces
            traced = self.trace(part, segment_key.input_specs, (), enforce_limit, segment_key.layers)
            if self.num_traces > num_traces:
                # The trace may have revealed more Python state that the layers read.
                segment_key = SegmentKey.of(part, segment_key.input_specs, segment_key.modes)
            base = self._compiled.lookup((segment_key, ())) or CompiledStage(part, segment_key, traced)
            self._compiled[segment_key, ()] = base
        gradient_layouts = () if gradients is None else base.traced.ports.gradient_layouts(gradients)
        found = base if not gradient_layouts else self._compiled.lookup((segment_key, gradient_layouts))
        if found is None:
            traced = self.trace(
                part, segment_key.input_specs, gradient_layouts, enforce_limit, segment_key.layers
            )
            found = self._compiled[segment_key, gradient_layouts] = CompiledStage(
                part, segment_key, traced, base
            )
        return found

    def num_bytes(self) -> int:
        """Returns an estimate of the bytes of the compiled stages, without `template_bytes`."""
        stages = [stage for _, stage in self._compiled.entries()]
        traces = {id(traced): traced for traced in (*self._traces.values(), *(s.traced for s in stages))}
        shared = self._reusable_graphs()
        written = {id(graph): graph for traced in traces.values() if (graph := traced.written_graph())}
        programs = sum(stage.native_bytes for stage in stages) + sum(t.num_bytes() for t in traces.values())
        return programs + _bytes_of(graph for key, graph in written.items() if key not in shared)

    def template_bytes(self) -> int:
        """Returns an estimate of the bytes of the templates, and of the traces kept for other stages."""
        templates = [family.template for family in list(self._families.values()) if family.template]
        num_values = sum(ProgramTemplates.of(template).num_values() for template in templates)
        return _bytes_of(self._reusable_graphs().values()) + VALUE_BYTES * num_values

    def _reusable_graphs(self) -> dict[int, JointGraph]:
        families = (graph for family in list(self._families.values()) for graph in family.graphs())
        parts = (graph for _, (graph, _) in self._parts.entries())
        return {id(graph): graph for graph in (*families, *parts)}

    def cached(self) -> list[CompiledStage]:
        """Returns the cached compiled stages, the least recently used first."""
        return [stage for _, stage in self._compiled.entries()]

    def forget(self, stages: Sequence[CompiledStage]) -> None:
        """Removes compiled stages from the cache, and traces that no other stage uses."""
        gone = set(map(id, stages))
        for key, stage in self._compiled.entries():
            if id(stage) in gone:
                self._compiled.pop(key, None)
        used = {id(stage.traced) for stage in self.cached()}
        for unused in [key for key, traced in self._traces.items() if id(traced) not in used]:
            del self._traces[unused]

    def forget_states(self, gone: Set[LayerState]) -> None:
        """Removes what was made for layers in these states."""
        self.forget([each for each in self.cached() if not gone.isdisjoint(each.segment_key.layers.states)])
        caches: list[dict[Any, Any]] = [self._traces, self._families, self._parts, self._trace_counts]
        for cache in caches:  # by a state key, and others
            for key in [key for key in cache if not gone.isdisjoint(key[0].states)]:
                del cache[key]

    def forget_oldest_template(self) -> bool:
        """Removes the graphs of equal layers, or the oldest template of layers without a cached stage.

        Returns:
            Whether there was one.
        """
        if self._parts:
            self._parts.popitem(last=False)
            return True
        used = {stage.segment_key.layers for stage in self.cached()}
        for key in self._families:
            if key[0] not in used:
                del self._families[key]
                self._trace_counts.pop((key[0], key[2]), None)
                return True
        return False

    def lowered(self) -> list[CompiledStage]:
        """Returns the cached compiled stages that are lowered, by their first layer."""
        found = (compiled for compiled in self._compiled.values() if compiled.traced.lowered)
        return sorted(found, key=lambda compiled: compiled.stage.first_layer)

    def find(self, segment_key: SegmentKey, gradients: ArrivingLayouts) -> CompiledStage | None:
        """Returns the cached compiled stage, or None."""
        base = self._compiled.lookup((segment_key, ()))
        return (
            None
            if base is None
            else self._compiled.lookup((segment_key, base.traced.ports.gradient_layouts(gradients)))
        )

    def blamed(self, stage: Stage, inputs: BoundarySpec, untraceable: Untraceable) -> int:
        """Returns the untraceable layer; bisects for it if the trace named none."""
        if untraceable.layer is not None:
            return untraceable.layer
        good, bad = 0, len(stage.layers)
        while bad - good > 1:
            middle = (good + bad) // 2
            part = stage.part(0, middle)
            try:
                self.trace(part, stage.part_inputs(inputs, part), ())
                good = middle
            except Untraceable:
                bad = middle
        return bad - 1

    def trace(
        self,
        stage: Stage,
        inputs: BoundarySpec,
        gradient_layouts: GradientLayouts,
        enforce_limit: bool = True,
        layers: StateKey | None = None,
    ) -> TracedStage:
        """Traces a stage under the calling thread's modes, or returns the cached trace.

        Args:
            stage: the layers to trace.
            inputs: the specs of the stage's inputs.
            gradient_layouts: the outputs whose gradients arrive in another layout than the output's, or not
                at all.
            enforce_limit: whether the limit on traces applies.
            layers: the state of the stage's layers, if it is known.

        Raises:
            Untraceable: the stage cannot be traced.
        """
        modes = TorchModes.now()  # PyTorch may change them in a trace: its first attention prefers cuDNN
        layers = layers or stage.state_key(modes)
        # Fake tensors in the place of such that share memory would not share it.
        if stage.traced_device != stage.device and (
            layers.depends_on_device or layers_share_memory(stage.layers)
        ):
            stage.trace_on_own_device()
        inputs = inputs.moved(stage.device, stage.traced_device)
        key = (layers, inputs, gradient_layouts, modes, stage.options.grad_dtype)
        known = self._traces.lookup(key)
        if known is not None and known.serves(stage):
            log_graph(stage, f"reused the graph of {known.origin}", inputs.tensors)
            return known
        family = self._family(layers, inputs, gradient_layouts, modes)
        num_attempts = family.num_attempts
        absent = stage.options.is_absent  # then, no trace has symbols
        instance = None if absent else family.instantiate(stage, inputs, gradient_layouts)
        self.num_traces += family.num_attempts - num_attempts
        if instance is not None:
            self.num_instantiated += 1
            log_graph(stage, "derived from a template", inputs.tensors)
            return self._traced(key, stage, instance, modes)
        count, limit = self._trace_counts.lookup((layers, modes)) or 0, self._max_traces
        if enforce_limit and limit is not None and count >= limit:
            raise TooManyTraces(None, f"it was traced {limit} times for different inputs")
        self.num_traces += 1
        try:
            found = trace_stage(stage, FakeInputs.of(inputs, absent), gradient_layouts, self._parts)
        except Untraceable:
            # The reason may be these inputs, so the attempt does not count for other calls.
            family.num_attempts = num_attempts
            if stage.traced_device == stage.device:
                raise
            # The layers may use a tensor that is no parameter or buffer, and is on their own device.
            inputs = inputs.moved(stage.traced_device, stage.device)
            stage.trace_on_own_device()
            return self.trace(stage, inputs, gradient_layouts, enforce_limit)
        layers = stage.state_key(modes)  # with the guards of these captures
        if stage.traced_device != stage.device and layers.depends_on_device:
            return self.trace(
                stage, inputs.moved(stage.traced_device, stage.device), gradient_layouts, enforce_limit
            )
        if not layers.is_guarded:
            if TorchModes.now() != modes:  # this trace has changed them for good: trace again under those
                return self.trace(stage, inputs, gradient_layouts, enforce_limit)
            raise Untraceable(None, "a capture changed the layers")
        self._family(layers, inputs, gradient_layouts, modes).add_sample(inputs, gradient_layouts, found)
        self._trace_counts[layers, modes] = 1 + (self._trace_counts.lookup((layers, modes)) or 0)
        return self._traced((layers, *key[1:]), stage, found, modes)

    def _traced(
        self, key: Hashable, stage: Stage, graph: JointGraph | Instance, modes: TorchModes
    ) -> TracedStage:
        """Returns a graph with what lowering needs, and caches it."""
        options = stage.options
        traced = self._traces[key] = TracedStage(
            with_user_launches(graph, stage.traced_device, options.is_absent),
            AccumulationPolicy(options.grad_dtype, modes.deterministic),
            fusion_of(stage.traced_device, options.fuse, options.is_absent),
            stage.traced_device,
            origin=layers_title(stage),
        )
        return traced

    def num_sizes_to_trace(self, stage: Stage, inputs: Sequence[BoundarySpec], state: StateKey) -> int | None:
        """Returns how many calls with new sizes will trace a stage after one with these inputs.

        The last of them makes a template, if it can, and takes longest.

        Returns:
            The number; -1 if a template serves these inputs, too; None if each new size is traced.
        """
        modes = TorchModes.now()
        family = self._families.lookup(
            (self._state_key(stage, modes, state), family_key(inputs[0], ()), modes)
        )
        left = (family or ShapeFamily()).num_sizes_to_trace()
        if not left:
            return None if left is None else -1
        return max(0, left - len(set(inputs)))

    def _family(
        self, layers: StateKey, inputs: BoundarySpec, gradient_layouts: GradientLayouts, modes: TorchModes
    ) -> ShapeFamily:
        key = (layers, family_key(inputs, gradient_layouts), modes)
        found = self._families.lookup(key)
        if found is None:
            found = self._families[key] = ShapeFamily()
        return found


def _bytes_of(graphs: Iterable[JointGraph]) -> int:
    return NODE_BYTES * sum(len(graph.module.graph.nodes) for graph in graphs)


@contextlib.contextmanager
def outside_inference_mode(stages: Iterable[Stage]) -> Iterator[None]:
    """Leaves inference mode in a block in which layers are traced, unless they have tensors made in it.

    Graphs serve calls outside of the mode, too, in which PyTorch decomposes fewer operators.
    """
    if not torch.is_inference_mode_enabled() or any(map(_has_inference_tensors, stages)):
        yield
        return
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


def _has_inference_tensors(stage: Stage) -> bool:
    """Returns whether layers have tensors that were made in inference mode, and may be written only in it."""
    tensors = (t for layer in stage.layers for t in (*layer.parameters(), *layer.buffers()))
    return any(tensor.is_inference() for tensor in tensors)


def _received(compiled: CompiledStage, receiver: Stage) -> BoundarySpec:
    """Returns the specs of a stage's outputs at the next stage, without skip tensors."""
    plain, _ = compiled.outputs.split_skips()
    tensors = tuple(at_receiver(spec, compiled.stage, receiver) for spec in plain.tensors)
    return replace(plain, tensors=tensors)


def at_receiver(spec: _Spec, sender: Stage, receiver: Stage) -> _Spec:
    """Returns a tensor's spec at the receiver: a transfer between devices changes the device alone."""
    if spec is None or sender.device == receiver.device:
        return spec
    return replace(spec, device=receiver.device)


def _skip_tensors(skips: Sequence[int], boundary: BoundarySpec) -> Iterator[tuple[int, int]]:
    """Yields, for each skip tensor that is not None, its index in the boundary and its skip's number."""
    tensors = (number for number, is_tensor in zip(skips, boundary.skips, strict=True) if is_tensor)
    return enumerate(tensors, boundary.num_plain)


def _joined_strides(outputs: Sequence[tuple[TensorSpec, ...]], dim: int, count: int) -> list[ArrivingLayouts]:
    """Returns, for each distinct micro-batch, the strides of its slices of the module's joined outputs.

    A loss usually produces gradients in this layout.
    """
    found: list[ArrivingLayouts] = [{} for _ in outputs]
    for index in range(min(len(specs) for specs in outputs)):
        parts = [specs[index].meta_tensor() for specs in outputs]
        # A later check raises for outputs that cannot be joined, with their shapes.
        strides: tuple[int, ...] = ()
        if all(part.dim() for part in parts) and (dim == 0 or _can_concatenate(parts, dim)):
            # Unless outputs are joined along dimension 0, the strides depend on the total length.
            whole = [parts[0]] * ((2 if dim == 0 else count) - len(parts)) + parts
            strides = torch.cat(whole, dim).stride()
        for gradients in found:
            gradients[index] = GradientLayout(strides)
    return found


def _can_concatenate(parts: Sequence[Tensor], dim: int) -> bool:
    """Returns whether tensors can be concatenated along a dimension."""
    if any(not -part.dim() <= dim < part.dim() for part in parts):
        return False
    return len({part.narrow(dim, 0, 0).shape for part in parts}) == 1

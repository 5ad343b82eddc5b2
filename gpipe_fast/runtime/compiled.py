"""Compiled stages: runs of layers compiled for given inputs and for given layouts of output gradients."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpipe_fast import _extension, progress, switches
from gpipe_fast._extension import Layout, LoweredSegment, ProgramPair, ProgramWithPorts, Segment
from gpipe_fast.devices import intra_op_threads
from gpipe_fast.fuse.availability import loader_of
from gpipe_fast.fuse.casts import hoist_parameter_casts
from gpipe_fast.layers.sharded import GradientPart
from gpipe_fast.layers.structure import layer_title
from gpipe_fast.lower.accumulation import AccumulationPolicy
from gpipe_fast.lower.checkpoint import SavedFraction
from gpipe_fast.lower.program import ProgramIR
from gpipe_fast.lower.program_template import Program, ProgramsOfStage, ProgramTemplates, lower_graphs
from gpipe_fast.lower.split import SplitGraphs, split
from gpipe_fast.runtime.cache import NATIVE_VALUE_BYTES, VALUE_BYTES, Cache
from gpipe_fast.runtime.module_warnings import layers_title
from gpipe_fast.runtime.stage import BoundarySpec, Stage, TorchModes, form_of, outputs_of
from gpipe_fast.strides import bits_of
from gpipe_fast.torch_private.operators import OpOverload
from gpipe_fast.trace.collectives import group_position
from gpipe_fast.trace.garbage import collector_paused
from gpipe_fast.trace.gradient_layouts import ArrivingLayouts as ArrivingLayouts
from gpipe_fast.trace.gradient_layouts import GradientLayout
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole, JointGraph, TracedPorts, buffers_of
from gpipe_fast.trace.layer_states import StateKey
from gpipe_fast.trace.symbolic import Instance
from gpipe_fast.trace.tensor_metadata import AnyTensor

if TYPE_CHECKING:
    from gpipe_fast.fuse.fuse import Fused, Fusion, Replaced

# The maximum number of entries in each cache of segments or gradient layouts, per stage.
CACHE_LIMIT = 64
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class SegmentKey:
    """A cache key: everything that a run of layers is compiled for, except the layouts of gradients.

    Attributes:
        first_layer: the index of the run's first layer in the whole model.
        num_layers: the number of layers in the run.
        input_specs: the specs of the run's inputs.
        modes: PyTorch's modes.
        layers: the state of the layers.
        parameters: the layers' parameters, as indices into the stage's parameters.
        buffers: the layers' buffers, as indices into the stage's buffers.
    """

    first_layer: int
    num_layers: int
    input_specs: BoundarySpec
    modes: TorchModes
    layers: StateKey = field(repr=False)
    parameters: tuple[int, ...]
    buffers: tuple[int, ...]

    @classmethod
    def of(
        cls, part: Stage, input_specs: BoundarySpec, modes: TorchModes, layers: StateKey | None = None
    ) -> SegmentKey:
        """Returns the key of a stage or part of a stage, for the current state of its layers."""
        layers = layers or part.state_key(modes)
        parameters, buffers = tuple(part.parameters()), tuple(part.buffers())
        return cls(part.first_layer, len(part.layers), input_specs, modes, layers, parameters, buffers)


class GradientLayoutHistory(Cache[SegmentKey, ArrivingLayouts]):
    """By segment key, the latest layouts of the outputs' gradients, if they differed from the expected ones.

    Attributes:
        num_changes: the number of changes so far.
    """

    num_changes = 0

    def record(self, segment_key: SegmentKey, tangents: Sequence[Tensor | None]) -> ArrivingLayouts:
        """Records the layouts of received gradients, and returns them."""
        gradients = {i: GradientLayout.of(t) for i, t in enumerate(tangents) if t is not None}
        if self.lookup(segment_key) != gradients:
            self[segment_key] = gradients
            self.num_changes += 1
        return gradients


@dataclass
class LoweredStage:
    """A traced stage under one checkpoint policy, lowered to programs as data.

    Attributes:
        programs: the forward program that saves what the backward reads; the backward program, None in
            inference and if no tensor needs a gradient; and the program that computes gradients of parameters
            later, None if the backward does.
        replaced: what fused kernels replaced in each graph, by its name.
    """

    programs: ProgramsOfStage
    replaced: Mapping[str, Sequence[Replaced]]

    @property
    def forward(self) -> ProgramIR:
        """The forward program, written out."""
        return self.programs[0].written()

    @property
    def backward(self) -> ProgramIR | None:
        """The backward program, written out."""
        return None if self.programs[1] is None else self.programs[1].written()

    @property
    def weights(self) -> ProgramIR | None:
        """The program of later gradients, written out."""
        return None if self.programs[2] is None else self.programs[2].written()

    def all_programs(self) -> list[Program]:
        """Returns the programs that there are."""
        return [each for each in self.programs if each is not None]


@dataclass
class TracedStage:
    """A joint graph and its lowered stages.

    Attributes:
        graph: the graph, or the instance of a template.
        accumulation: how gradients of parameters are accumulated.
        fusion: fuses the graphs; None to leave them as they are.
        device: the device that the graph was made for.
        origin: the layers that the graph was made for; equal layers share it.
        threads: the number of intra-op threads that the graph was made for; lowering depends on it.
        lowered: the lowered stages, by the arguments of ``lower``.
    """

    graph: JointGraph | Instance
    accumulation: AccumulationPolicy = field(default_factory=AccumulationPolicy)
    fusion: Fusion | None = None
    device: torch.device = _CPU
    origin: str = ""
    threads: int = field(default_factory=torch.get_num_threads)
    lowered: dict[tuple[SavedFraction, bool], LoweredStage] = field(default_factory=dict)

    @property
    def hoists_casts(self) -> bool:
        """Whether casts of parameters happen once per run of the stage, not in each micro-batch."""
        return self.device.type == "cuda"

    def serves(self, stage: Stage) -> bool:
        """Returns whether the trace may be used for a stage that equals the traced one."""
        return layers_title(stage) == self.origin or not switches.is_disabled("equal-layers")

    @property
    def joint(self) -> JointGraph:
        """The graph; an instance of a template is written out on first use."""
        return self.graph.joint if isinstance(self.graph, Instance) else self.graph

    def drop_graph(self) -> None:
        """Drops a graph that a template can write again, and the programs as data that were lowered from it.

        C++ programs stay as they are. Stages with fused kernels keep theirs, for reports on them.
        """
        if isinstance(self.graph, Instance) and self.fusion is None:
            self.graph.drop_joint()
            self.lowered.clear()

    def num_bytes(self) -> int:
        """Returns an estimate of the bytes of the lowered stages, without the graph."""
        programs = (program for each in list(self.lowered.values()) for program in each.all_programs())
        return VALUE_BYTES * sum(program.num_values for program in programs)

    def written_graph(self) -> JointGraph | None:
        """Returns the graph if it is in memory."""
        return self.graph.written() if isinstance(self.graph, Instance) else self.graph

    def constants(self) -> list[Tensor]:
        """Returns the tensors that layers refer to although they are no parameters or buffers of theirs."""
        joint = self.graph.template.joint if isinstance(self.graph, Instance) else self.graph
        nodes = joint.module.graph.find_nodes(op="get_attr")
        return [getattr(joint.module, str(node.target)) for node in nodes]

    def operators(self) -> list[str]:
        """Returns the graph's operators, with arguments that are no sizes; nothing for an instance."""
        found = []
        for node in () if isinstance(self.graph, Instance) else self.graph.module.graph.nodes:
            if node.op == "call_function":
                op, given = node.target, enumerate((*node.args, *node.kwargs.values()))
                # Other processes have other names for their groups.
                group = group_position(op) if isinstance(op, OpOverload) else None
                known = [x for i, x in given if i != group and isinstance(x, (bool, float, str))]
                found.append(f"{op} {known}")
        return found

    @functools.cached_property
    def ports(self) -> TracedPorts:
        """The ports of the graph."""
        return self.graph.ports

    def lower(self, saved_fraction: SavedFraction, defers_weights: bool = False) -> LoweredStage:
        """Splits and lowers the joint graph, once for the same arguments (see ``split``)."""
        key = saved_fraction, defers_weights
        found = self.lowered.get(key)  # another thread may drop it
        if found is None:
            with intra_op_threads(self.threads), collector_paused():
                found = self.lowered[key] = self._lower(*key)
        return found

    def _lower(self, saved_fraction: SavedFraction, defers_weights: bool) -> LoweredStage:
        graph = self.graph
        # Stages on GPUs are written out for each length: fusion decides by bytes and divisibility, which a
        # template knows only as formulas, and hoisted casts are new inputs, which no template has.
        if isinstance(graph, Instance) and self.fusion is None and not self.hoists_casts:
            progress.step("lowering")
            templates = ProgramTemplates.of(graph.template)
            return LoweredStage(templates.at(graph, saved_fraction, self.accumulation, defers_weights), {})
        parts, fused = self.fuse(saved_fraction, defers_weights=defers_weights)
        progress.step("lowering")
        forward, backward, replaced = parts.forward, parts.backward, {}
        if fused is not None:
            replaced = {each.graph.name: each.replaced for each in fused}
            forward, backward = fused[0].graph, fused[-1].graph if backward else None
        programs = lower_graphs(forward, backward, self.accumulation, parts.weights)
        return LoweredStage(programs, replaced)

    def fuse(
        self, saved_fraction: SavedFraction, explain: bool = False, defers_weights: bool = False
    ) -> tuple[SplitGraphs, Sequence[Fused] | None]:
        """Splits the joint graph, and fuses its parts; None for parts that are left as they are.

        Args:
            saved_fraction: as for ``split``.
            explain: whether to find out why nodes are left.
            defers_weights: as for ``split``.
        """
        joint = hoist_parameter_casts(self.joint) if self.hoists_casts else self.joint
        parts = split(joint, saved_fraction, defers_weights=defers_weights)
        if self.fusion is None:
            return parts, None
        return parts, self.fusion.fuse(parts.forward, parts.backward, explain)


class CompiledStage:
    """A stage or part of a stage, compiled for one segment key and one layout of its outputs' gradients.

    Attributes:
        stage: the stage or part.
        segment_key: the segment key that it was compiled for.
        outputs: the specs of its outputs.
        traced: its graph, possibly shared with other stages.
        native_bytes: an estimate of the bytes of its C++ programs, without those of the trace.
    """

    def __init__(
        self, stage: Stage, segment_key: SegmentKey, traced: TracedStage, base: CompiledStage | None = None
    ) -> None:
        """Makes a compiled stage.

        Args:
            stage: the stage or part.
            segment_key: the segment key.
            traced: the trace for this key and these gradient layouts.
            base: the stage compiled for gradients in the outputs' layouts; None if this stage is.
        """
        self.stage = stage
        self.segment_key = segment_key
        self.outputs: BoundarySpec = (
            outputs_of(traced.ports).moved(traced.device, stage.device) if base is None else base.outputs
        )
        self.traced = traced
        self._reached: list[int] = (
            list(traced.ports.of(GraphRole.PARAMETER_GRADIENT)) if base is None else base._reached
        )
        self._note_sharded_gradients()
        self._segments: dict[tuple[SavedFraction, bool], Segment] = {}
        self.native_bytes = 0

    def _note_sharded_gradients(self) -> None:
        """Notes what this process computes of the gradients of sharded parameters.

        Raises:
            RuntimeError: they are placed in another way than for other inputs.
        """
        known = self.stage.sharded_gradients
        for port, tensor in self.traced.ports.outputs:
            if port.placements is None:
                continue
            assert tensor is not None
            index = self.segment_key.parameters[port.index]
            found = GradientPart(port.placements, tuple(tensor.shape))
            if known.setdefault(index, found) != found:
                raise RuntimeError(
                    f"the gradient of parameter {index} of the stage of layer {self.stage.first_layer} is "
                    f"placed as {found} for these inputs, and as {known[index]} for others; fix the "
                    "placements in the layer, by redistribute"
                )

    @property
    def inputs(self) -> BoundarySpec:
        """The specs of the stage's inputs."""
        return self.segment_key.input_specs

    def written_buffers(self) -> list[Tensor]:
        """Returns the buffers that the stage's forward writes."""
        buffers = buffers_of(self.stage.layers)
        return [buffers[p.index] for p, _ in self.traced.ports.outputs if p.role is GraphRole.BUFFER]

    def parameters_with_gradients(self) -> set[int]:
        """Returns the parameters of which the stage computes gradients, as indices into the stage's."""
        return {self.segment_key.parameters[i] for i in self._reached}

    def segment(self, saved_fraction: SavedFraction, defers_weights: bool = False) -> Segment:
        """Returns the segment with this stage's programs for one split; builds it on first use."""
        key = saved_fraction, defers_weights
        if key not in self._segments:
            progress.step("splitting", self.stage.first_layer, len(self.stage.layers))
            lowered = self.traced.lower(*key)
            self._segments[key] = self._build(lowered)
            for each in lowered.all_programs():
                self.native_bytes += NATIVE_VALUE_BYTES * each.num_values + each.constant_bytes()
        return self._segments[key]

    def _build(self, lowered: LoweredStage) -> Segment:
        stage = self.stage
        begin = stage.first_layer - stage.whole.first_layer
        tangents = self.traced.ports.of(GraphRole.TANGENT)
        return LoweredSegment(
            begin=begin,
            end=begin + len(stage.layers),
            pops=stage.pops,
            stashes=stage.stashes,
            programs=self._program_pair(lowered),
            inputs=[_layout(spec.meta_tensor()) for spec in self.inputs.tensors],
            input_form=form_of(self.inputs),
            output_form=form_of(self.outputs),
            first_random_layer=stage.first_layer if self.traced.ports.draws else None,
            written_inputs=self.traced.ports.joint.written_inputs,
            tangent_layouts=[
                _layout(tangents[i]) if i in tangents else None for i in range(len(self.outputs.tensors))
            ],
            reached=[self.segment_key.parameters[i] for i in self._reached],
            origin=(stage, self.segment_key),
        )

    def _program_pair(self, lowered: LoweredStage) -> ProgramPair:
        stage, segment_key, loader = self.stage, self.segment_key, loader_of(self.stage.device)
        titles = [layer_title(stage.first_layer + index, layer) for index, layer in enumerate(stage.layers)]

        def with_ports(program: Program) -> ProgramWithPorts:
            native = program.build(
                stage.arena,
                stage.device,
                lowered_for=self.traced.device,
                parameters=segment_key.parameters,
                titles=titles,
                load_kernel=None if loader is None else loader.load,
                own_group=stage.own_group,
            )
            inputs, outputs = (
                _extension_ports(ports, segment_key.buffers) for ports in (program.inputs, program.outputs)
            )
            return ProgramWithPorts(native, inputs, outputs)

        forward, backward, weights = (
            None if program is None else with_ports(program) for program in lowered.programs
        )
        last = lowered.programs[2] or lowered.programs[1]
        gradients = () if last is None else last.gradients
        assert forward is not None
        return ProgramPair(forward, backward, weights, [segment_key.parameters[i] for i in gradients])


def _layout(tensor: AnyTensor) -> Layout:
    return Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, bits_of(tensor))


def _extension_ports(ports: Sequence[GraphPort], buffers: Sequence[int]) -> list[_extension.Port]:
    return [
        _extension.Port(
            getattr(_extension.Role, p.role.name),
            buffers[p.index] if p.role is GraphRole.BUFFER else p.index,
            p.keeps_version,
        )
        for p in ports
    ]

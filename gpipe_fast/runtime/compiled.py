"""Compiled stages: runs of layers compiled for given inputs and given layouts of their outputs' gradients."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor, fx, nn

from gpipe_fast import _extension
from gpipe_fast._extension import Layout, LoweredSegment, Pass, PortedProgram, Segment, Snapshot
from gpipe_fast.layers.title import title
from gpipe_fast.lower.accumulation import Accumulation
from gpipe_fast.lower.checkpoint import Share
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.program import Program
from gpipe_fast.lower.split import Split, split
from gpipe_fast.runtime.stage import Boundary, Modes, Spec, Stage, form_of
from gpipe_fast.trace.arrival import Arrivals
from gpipe_fast.trace.fingerprint import fingerprint
from gpipe_fast.trace.trace import Joint, Port, Role, buffers_of

Gradients = dict[int, tuple[int, ...]]  # by output, its gradient's strides; no entry if none arrives

# The maximum number of entries in each cache of segments or gradient layouts, per stage.
REMEMBERED = 64

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Cache(OrderedDict[_Key, _Value]):
    """A least-recently-used cache with a maximum number of entries."""

    def __init__(self, limit: int) -> None:
        """Makes an empty cache of at most `limit` entries."""
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: _Key, value: _Value) -> None:
        super().__setitem__(key, value)
        while len(self) > self._limit:
            self.popitem(last=False)

    def find(self, key: _Key) -> _Value | None:
        """Returns the entry, or None, and marks the entry as the most recently used."""
        found = self.get(key)
        with contextlib.suppress(KeyError):  # another thread may have evicted the entry
            self.move_to_end(key)
        return found


@dataclass(frozen=True)
class Place:
    """A cache key: everything that a run of layers is compiled for, except the layouts of gradients.

    Attributes:
        first_layer: the index of the run's first layer in the whole model.
        num_layers: the number of layers in the run.
        arriving: the specs of the run's inputs.
        modes: PyTorch's modes.
        layers: the layers' fingerprint.
        parameters: the layers' parameters, as indices into the stage's parameters.
        buffers: the layers' buffers, as indices into the stage's buffers.
        snapshot: a snapshot of the layers, taken with the fingerprint.
    """

    first_layer: int
    num_layers: int
    arriving: Boundary
    modes: Modes
    layers: Hashable
    parameters: tuple[int, ...]
    buffers: tuple[int, ...]
    snapshot: Snapshot = field(compare=False, repr=False)

    @classmethod
    def of(cls, part: Stage, arriving: Boundary, modes: Modes) -> Place:
        """Returns the key of a stage or part of a stage, for the current state of its layers."""
        snapshot = Snapshot()
        layers = fingerprint(part.layers, snapshot=snapshot)
        parameters, buffers = tuple(part.parameters()), tuple(part.buffers())
        return cls(part.first_layer, len(part.layers), arriving, modes, layers, parameters, buffers, snapshot)

    def is_current(self, layers: Sequence[nn.Module]) -> bool:
        """Returns whether the layers are unchanged, even if a trace has extended their fingerprint since."""
        return fingerprint(layers) == self.layers or self.snapshot.unchanged(layers)


class Arrived(Cache[Place, Gradients]):
    """By segment key, the latest layouts of the outputs' gradients, if they differed from the expected ones.

    Attributes:
        changes: the number of changes so far.
    """

    changes = 0

    def note(self, place: Place, tangents: Sequence[Tensor | None]) -> Gradients:
        """Records the layouts of received gradients, and returns them."""
        gradients = {i: t.stride() for i, t in enumerate(tangents) if t is not None}
        if self.find(place) != gradients:
            self[place] = gradients
            self.changes += 1
        return gradients


@dataclass(frozen=True)
class Lowered:
    """A traced stage under one checkpoint policy, lowered to programs as data.

    Attributes:
        split: the forward and backward graphs, and the tensors saved between them.
        forward: the forward program that saves what ``backward`` reads.
        backward: the backward program; None in inference, and if no tensor needs a gradient.
    """

    split: Split
    forward: Program
    backward: Program | None


@dataclass
class Traced:
    """A joint graph and its lowered stages, by the fraction of activations that a micro-batch saves."""

    joint: Joint
    accumulation: Accumulation = field(default_factory=Accumulation)
    lowered: dict[Share, Lowered] = field(default_factory=dict)

    def lower(self, share: Share) -> Lowered:
        """Splits and lowers the joint graph, once per fraction (see ``split``)."""
        if share not in self.lowered:
            parts = split(self.joint, share)
            backward = None if parts.backward is None else lower(parts.backward, self.accumulation)
            self.lowered[share] = Lowered(parts, lower(parts.forward_saving), backward)
        return self.lowered[share]


class CompiledStage:
    """A stage or part of a stage, compiled for one segment key and one layout of its outputs' gradients.

    Attributes:
        stage: the stage or part.
        place: the segment key that it was compiled for.
        outputs: the specs of its outputs.
        traced: its graph, possibly shared with other stages.
    """

    def __init__(self, stage: Stage, place: Place, traced: Traced, base: CompiledStage | None = None) -> None:
        """Makes a compiled stage.

        Args:
            stage: the stage or part.
            place: the segment key.
            traced: the trace for this key and these gradient layouts.
            base: the compiled stage for gradients in the outputs' layouts; None if this is the one.
        """
        self.stage = stage
        self.place = place
        self.outputs: Boundary = _outputs(traced.joint) if base is None else base.outputs
        self.traced = traced
        self._reached: list[int] = (
            list(traced.joint.of(Role.PARAMETER_GRADIENT)) if base is None else base._reached
        )
        self._segments: dict[Share, Segment] = {}

    @property
    def inputs(self) -> Boundary:
        """The specs of the stage's inputs."""
        return self.place.arriving

    def written_buffers(self) -> list[Tensor]:
        """Returns the buffers that the stage's forward writes."""
        buffers = buffers_of(self.stage.layers)
        return [buffers[n.port.index] for n in self.traced.joint.outputs if n.port.role is Role.BUFFER]

    def draws(self) -> bool:
        """Returns whether any operator of the stage draws random numbers."""
        return any(n.port.role is Role.KEY and bool(n.node.users) for n in self.traced.joint.inputs)

    def input_gradients(self) -> Gradients:
        """Returns the strides of the gradients of the stage's inputs."""
        given = self.traced.joint.of(Role.INPUT_GRADIENT)
        return {i: node.meta["val"].stride() for i, node in given.items()}

    def arrivals(self, gradients: Gradients) -> Arrivals:
        """Returns the outputs whose gradients differ in layout from the output, or do not arrive."""
        # Strides of size-one dimensions are compared, too: they distinguish channels_last from contiguous.
        return tuple(
            (index, gradients.get(index))
            for index, tangent in self.traced.joint.of(Role.TANGENT).items()
            if gradients.get(index) != tangent.meta["val"].stride()
        )

    def segment(self, share: Share) -> Segment:
        """Returns the segment with this stage's programs for one saved fraction; builds it on first use."""
        if share not in self._segments:
            self._segments[share] = self._build(self.traced.lower(share))
        return self._segments[share]

    def _build(self, lowered: Lowered) -> Segment:
        stage = self.stage
        begin = stage.first_layer - stage.whole.first_layer
        tangents = self.traced.joint.of(Role.TANGENT)
        return LoweredSegment(
            begin=begin,
            end=begin + len(stage.layers),
            pops=stage.pops,
            stashes=stage.stashes,
            run_pass=self._pass(lowered),
            inputs=[Layout(spec.shape, spec.strides, spec.dtype) for spec in self.inputs.tensors],
            takes=form_of(self.inputs),
            returns=form_of(self.outputs),
            draws=stage.first_layer if self.draws() else None,
            writes_inputs=self.traced.joint.writes_inputs,
            tangents=[
                _layout(tangents[i]) if i in tangents else None for i in range(len(self.outputs.tensors))
            ],
            reached=[self.place.parameters[i] for i in self._reached],
            origin=(stage, self.place),
        )

    def _pass(self, lowered: Lowered) -> Pass:
        stage, place = self.stage, self.place
        titles = [title(stage.first_layer + index, layer) for index, layer in enumerate(stage.layers)]

        def ported(program: Program) -> PortedProgram:
            native = program.build(stage.arena, stage.device, parameters=place.parameters, titles=titles)
            inputs, outputs = (_native(ports, place.buffers) for ports in (program.inputs, program.outputs))
            return PortedProgram(native, inputs, outputs)

        forward, backward = ported(lowered.forward), lowered.backward
        if backward is None:
            return Pass(forward, None, [])
        return Pass(forward, ported(backward), [place.parameters[index] for index in backward.gradients])


def _layout(node: fx.Node) -> Layout:
    value = node.meta["val"]
    return Layout(tuple(value.shape), value.stride(), value.dtype)


def _native(ports: Sequence[Port], buffers: Sequence[int]) -> list[_extension.Port]:
    return [
        _extension.Port(
            getattr(_extension.Role, p.role.name), buffers[p.index] if p.role is Role.BUFFER else p.index
        )
        for p in ports
    ]


def _outputs(joint: Joint) -> Boundary:
    nodes, differentiable = joint.of(Role.OUTPUT), joint.differentiable_outputs()
    specs = tuple(Spec.of(nodes[i].meta["val"], i in differentiable) for i in range(len(nodes)))
    return Boundary(specs, joint.structure, joint.stashed)

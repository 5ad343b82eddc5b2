"""A run of layers compiled for what reaches it, and for the gradients that come back to it."""

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

Gradients = dict[int, tuple[int, ...]]  # the strides of those that arrive, by output

# Places and segments that are remembered, of each sort.
REMEMBERED = 64

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Cache(OrderedDict[_Key, _Value]):
    """Keeps so many, those used last."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: _Key, value: _Value) -> None:
        super().__setitem__(key, value)
        while len(self) > self._limit:
            self.popitem(last=False)

    def find(self, key: _Key) -> _Value | None:
        """What is kept, if it is, used now."""
        found = self.get(key)
        with contextlib.suppress(KeyError):  # another thread may have dropped it
            self.move_to_end(key)
        return found


@dataclass(frozen=True)
class Place:
    """A run of layers and what reaches it: all that it is compiled for but the gradients that come back.

    Attributes:
        first_layer: in the whole model.
        num_layers: how many.
        arriving: what reaches the first.
        modes: PyTorch's global ones.
        layers: the layers' fingerprint.
        parameters: which of its stage's they have.
        buffers: which of its stage's buffers they have.
        snapshot: of the layers when the fingerprint was taken.
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
        """That of a stage or a part of one, whose layers are as they are now."""
        snapshot = Snapshot()
        layers = fingerprint(part.layers, snapshot=snapshot)
        parameters, buffers = tuple(part.parameters()), tuple(part.buffers())
        return cls(part.first_layer, len(part.layers), arriving, modes, layers, parameters, buffers, snapshot)

    def is_current(self, layers: Sequence[nn.Module]) -> bool:
        """Whether its layers are as they were; meanwhile a trace may have shown more of what they read."""
        return fingerprint(layers) == self.layers or self.snapshot.unchanged(layers)


class Arrived(Cache[Place, Gradients]):
    """In which layouts gradients came last to what a place hands on, where they came otherwise than expected.

    Attributes:
        changes: how often that changed.
    """

    changes = 0

    def note(self, place: Place, tangents: Sequence[Tensor | None]) -> Gradients:
        """Notes gradients that came, and returns their layouts."""
        gradients = {i: t.stride() for i, t in enumerate(tangents) if t is not None}
        if self.find(place) != gradients:
            self[place] = gradients
            self.changes += 1
        return gradients


@dataclass(frozen=True)
class Lowered:
    """A traced stage under one checkpoint policy, as data.

    Attributes:
        split: the graphs, and what is saved between them.
        forward: the forward that goes with ``backward``.
        backward: None in inference, and where nothing needs a gradient.
    """

    split: Split
    forward: Program
    backward: Program | None


@dataclass
class Traced:
    """A joint graph and its lowered forms by the share of activations that is saved."""

    joint: Joint
    accumulation: Accumulation = field(default_factory=Accumulation)
    lowered: dict[Share, Lowered] = field(default_factory=dict)

    def lower(self, share: Share) -> Lowered:
        """Splits and lowers, once per share (see ``split``)."""
        if share not in self.lowered:
            parts = split(self.joint, share)
            backward = None if parts.backward is None else lower(parts.backward, self.accumulation)
            self.lowered[share] = Lowered(parts, lower(parts.forward_saving), backward)
        return self.lowered[share]


class CompiledStage:
    """A stage, or a part of one, for one signature and one layout of the gradients that come to its outputs.

    Attributes:
        stage: what was compiled.
        place: what it was compiled for.
        outputs: what leaves it.
        traced: its graph, possibly shared with other stages.
    """

    def __init__(self, stage: Stage, place: Place, traced: Traced, base: CompiledStage | None = None) -> None:
        """Makes one; ``base`` is the one for gradients laid out as its outputs, where this one is not."""
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
        """What reaches it."""
        return self.place.arriving

    def written_buffers(self) -> list[Tensor]:
        """The buffers that its forward writes."""
        buffers = buffers_of(self.stage.layers)
        return [buffers[n.port.index] for n in self.traced.joint.outputs if n.port.role is Role.BUFFER]

    def draws(self) -> bool:
        """Whether any of its operators is random."""
        return any(n.port.role is Role.KEY and bool(n.node.users) for n in self.traced.joint.inputs)

    def input_gradients(self) -> Gradients:
        """In which layouts it hands back gradients of its inputs."""
        given = self.traced.joint.of(Role.INPUT_GRADIENT)
        return {i: node.meta["val"].stride() for i, node in given.items()}

    def arrivals(self, gradients: Gradients) -> Arrivals:
        """The gradients of its outputs that come otherwise than they are laid out, or not at all."""
        # Strides of dimensions of size one count: they tell channels_last from contiguous.
        return tuple(
            (index, gradients.get(index))
            for index, tangent in self.traced.joint.of(Role.TANGENT).items()
            if gradients.get(index) != tangent.meta["val"].stride()
        )

    def segment(self, share: Share) -> Segment:
        """The programs of this stage, in its own memory, for one share; built on first use."""
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

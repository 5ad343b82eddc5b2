"""Stages and what reaches them to programs: equal stages are traced and lowered once."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import overload

import torch
from torch import Tensor, fx

from gpipe_fast import _extension
from gpipe_fast._extension import Layout, Pass, PortedProgram, Segment
from gpipe_fast.layers.title import title
from gpipe_fast.lower.accumulation import Accumulation
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.program import Program
from gpipe_fast.lower.split import FULL_RECOMPUTE, NO_RECOMPUTE, Split, split
from gpipe_fast.runtime.stage import Boundary, Modes, Spec, Stage, form_of
from gpipe_fast.trace import reads
from gpipe_fast.trace.arrival import Arrivals, layout_of
from gpipe_fast.trace.fingerprint import fingerprint
from gpipe_fast.trace.reads import Reads
from gpipe_fast.trace.refuse import Untraceable
from gpipe_fast.trace.symbolic import Sample, Template, equal
from gpipe_fast.trace.trace import Joint, Port, Role, Setting, buffers_of, trace, trace_symbolic

Gradients = dict[int, tuple[int, ...]]  # the strides of those that arrive, by output


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
    lowered: dict[float, Lowered] = field(default_factory=dict)

    def lower(self, budget: float) -> Lowered:
        """Splits and lowers, once per budget (see ``split``)."""
        if budget not in self.lowered:
            parts = split(self.joint, budget)
            backward = None if parts.backward is None else lower(parts.backward, self.accumulation)
            self.lowered[budget] = Lowered(parts, lower(parts.forward_saving), backward)
        return self.lowered[budget]


class CompiledStage:
    """A stage, or a part of one, for one signature.

    Attributes:
        stage: what was compiled.
        inputs: what reaches it.
        outputs: what leaves it.
        traced: its graph, possibly shared with other stages.
    """

    def __init__(
        self, stage: Stage, inputs: Boundary, traced: Traced, outputs: Boundary | None = None
    ) -> None:
        """Makes one; ``outputs`` where the graph takes fewer gradients than can come."""
        self.stage = stage
        self.inputs = inputs
        self.traced = traced
        self.outputs = outputs or _outputs(traced.joint)
        self._segments: dict[float, Segment] = {}

    def written_buffers(self) -> list[Tensor]:
        """The buffers that its forward writes."""
        buffers = buffers_of(self.stage.layers)
        return [buffers[n.port.index] for n in self.traced.joint.outputs if n.port.role is Role.BUFFER]

    def draws(self) -> bool:
        """Whether any of its operators is random."""
        return any(n.port.role is Role.KEY and bool(n.node.users) for n in self.traced.joint.inputs)

    def segment(self, budget: float) -> Segment:
        """The programs of this stage, in its own memory, for one budget; built on first use."""
        if budget not in self._segments:
            self._segments[budget] = self._build(self.traced.lower(budget))
        return self._segments[budget]

    def _build(self, lowered: Lowered) -> Segment:
        stage = self.stage
        parameters, buffers = stage.parameters(), stage.buffers()
        titles = [title(stage.first_layer + index, layer) for index, layer in enumerate(stage.layers)]

        def ported(program: Program) -> PortedProgram:
            native = program.build(stage.arena, stage.device, parameters=parameters, titles=titles)
            return PortedProgram(native, _native(program.inputs, buffers), _native(program.outputs, buffers))

        backward = lowered.backward
        run_pass = Pass(
            ported(lowered.forward),
            None if backward is None else ported(backward),
            [parameters[index] for index in backward.gradients] if backward is not None else [],
        )
        begin = stage.first_layer - stage.whole.first_layer
        tangents = self.traced.joint.of(Role.TANGENT)
        return Segment.lowered(
            begin,
            begin + len(stage.layers),
            stage.pops,
            stage.stashes,
            run_pass,
            [Layout(spec.shape, spec.strides, spec.dtype) for spec in self.inputs.tensors],
            form_of(self.inputs),
            form_of(self.outputs),
            stage.first_layer,
            self.draws(),
            self.traced.joint.writes_inputs,
            [_layout(tangents[i]) if i in tangents else None for i in range(len(self.outputs.tensors))],
        )


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


@dataclass(frozen=True)
class Refusal:
    """A pipeline that cannot be compiled: the first stage that stands in the way, and why."""

    stage_index: int
    untraceable: Untraceable


# How often a stage is traced for what differs in shapes, or in constants, and no template is right for.
TRACES = 64
# How often a template is tried for one kind.
_ATTEMPTS = 3


class TooManyTraces(Untraceable):
    """A stage that met too many shapes, or constants, to trace it for each."""


@dataclass
class _Kind:
    """What differs in sizes alone.

    Attributes:
        samples: of it, the first two.
        template: for all sizes.
        num_attempts: how many there were to make one.
    """

    samples: list[Sample] = field(default_factory=list)
    template: Template | None = None
    num_attempts: int = 0


class Compiler:
    """Compiles pipelines.

    Attributes:
        num_traces: how many stages have been traced so far.
        num_written: how many were written out from a template instead.
    """

    def __init__(self, limit: int = 128, most: int | None = None) -> None:
        """Makes one.

        Args:
            limit: remembers so many traces, those used last.
            most: traces a stage so often as it is, in equal modes; None for no end.
        """
        self.num_traces = self.num_written = 0
        self._limit = limit
        self._most = most
        self._times: Counter[tuple[Hashable, Modes]] = Counter()
        # What layers of a fingerprint were seen to read when they were traced first.
        self._reads: OrderedDict[Hashable, list[Reads]] = OrderedDict()
        self._traces: OrderedDict[Hashable, Traced] = OrderedDict()
        self._kinds: OrderedDict[tuple[Hashable, Hashable, Modes], _Kind] = OrderedDict()

    def compile(
        self,
        stages: Sequence[Stage],
        microbatches: Sequence[Boundary],
        defined: Collection[int] | None = None,
        join_along: int = 0,
        num_microbatches: int = 2,
    ) -> list[list[CompiledStage]] | Refusal:
        """Traces all stages for the micro-batches of a mini-batch, under the present grad and autocast modes.

        Args:
            stages: the pipeline.
            microbatches: what reaches the first stage, each different signature once, in order.
            defined: the outputs of the last stage that a gradient comes to; by default all that can take one.
            join_along: the dimension along which outputs are joined.
            num_microbatches: how many there are; all but the last are as the first.
        """
        pipelines: list[list[CompiledStage]] = []
        for inputs in microbatches:
            compiled: list[CompiledStage] = []
            stashed: dict[int, tuple[Spec | None, Stage]] = {}
            for index, stage in enumerate(stages):
                skips = [sent(*stashed.pop(number), stage) for number in stage.pops]
                inputs = inputs.with_skips(skips)
                traced = self.trace(stage, inputs, ())
                if isinstance(traced, Untraceable):
                    return Refusal(index, self.blamed(stage, inputs, traced))
                compiled.append(CompiledStage(stage, inputs, traced))
                inputs, skips = compiled[-1].outputs.apart()
                stashed.update({n: (spec, stage) for n, spec in zip(stage.stashes, skips, strict=True)})
                if index + 1 < len(stages):
                    tensors = tuple(sent(spec, stage, stages[index + 1]) for spec in inputs.tensors)
                    inputs = replace(inputs, tensors=tensors)
            pipelines.append(compiled)
        outputs = [compiled[-1].outputs.tensors for compiled in pipelines]
        joined = _joined(outputs, join_along, num_microbatches)
        for compiled, gradients in zip(pipelines, joined, strict=True):
            if defined is not None:
                gradients = {i: strides for i, strides in gradients.items() if i in defined}
            refusal = self._let_arrive(compiled, gradients)
            if refusal is not None:
                return refusal
        return pipelines

    def blamed(self, stage: Stage, inputs: Boundary, untraceable: Untraceable) -> Untraceable:
        """Names the layer without which the layers before it could be traced, where the trace names none."""
        if untraceable.layer is not None or isinstance(untraceable, TooManyTraces):
            return untraceable
        good, bad = 0, len(stage.layers)
        while bad - good > 1:
            middle = (good + bad) // 2
            part = stage.part(0, middle)
            is_bad = isinstance(self.trace(part, stage.narrowed(inputs, part), ()), Untraceable)
            good, bad = (good, middle) if is_bad else (middle, bad)
        return replace(untraceable, layer=bad - 1)

    def _let_arrive(self, compiled: list[CompiledStage], gradients: Gradients) -> Refusal | None:
        """From the last stage on, tells each in what layout its gradients come, or that they do not."""
        of_skips: dict[int, tuple[int, ...]] = {}
        for index in reversed(range(len(compiled))):
            before = compiled[index]
            for place, number in _tensors_of(before.stage.stashes, before.outputs):
                if number in of_skips:
                    gradients[place] = of_skips[number]
            arrivals = arrivals_of(before.traced.joint, gradients)
            if arrivals:
                traced = self.trace(before.stage, before.inputs, arrivals)
                if isinstance(traced, Untraceable):
                    return Refusal(index, traced)
                compiled[index] = CompiledStage(before.stage, before.inputs, traced, before.outputs)
            given = compiled[index].traced.joint.of(Role.INPUT_GRADIENT)
            gradients = {i: node.meta["val"].stride() for i, node in given.items()}
            for place, number in _tensors_of(before.stage.pops, before.inputs):
                if place in gradients:
                    of_skips[number] = gradients.pop(place)
        return None

    def trace(self, stage: Stage, inputs: Boundary, arrivals: Arrivals) -> Traced | Untraceable:
        """Traces one stage, or remembers it, under the present modes.

        Args:
            stage: what to trace.
            inputs: what reaches it.
            arrivals: which gradients come otherwise than their outputs are laid out, or not at all.
        """
        layers, modes = self._fingerprint(stage), Modes.now()
        key = (layers, inputs, arrivals, modes, stage.grad_dtype)
        if key in self._traces:
            self._traces.move_to_end(key)
            return self._traces[key]
        kind = self._kinds.setdefault((layers, _kind_of(inputs, arrivals), modes), _Kind())
        num_attempts = kind.num_attempts
        joint = self._write_out(kind, stage, inputs, arrivals)
        if joint is None:
            if self._most is not None and self._times[layers, modes] >= self._most:
                return TooManyTraces(None, f"it was traced {self._most} times for what it met")
            found = self._trace_as_it_is(kind, stage, inputs, arrivals)
            if isinstance(found, Untraceable):
                # Perhaps for what came in, which says nothing of other calls.
                kind.num_attempts = num_attempts
                return found
            joint = found
            self._times[layers, modes] += 1
            key = (self._after_trace(stage, layers), *key[1:])
        traced = self._traces[key] = Traced(joint, Accumulation(stage.grad_dtype, modes.deterministic))
        for cache in (self._traces, self._kinds, self._reads):
            while len(cache) > self._limit:
                cache.popitem(last=False)
        return traced

    def _fingerprint(self, stage: Stage) -> Hashable:
        """The fingerprint of a stage's layers, of which as much is known as of equal ones traced before."""
        layers = fingerprint(stage.layers)
        known = self._reads.get(layers)
        return fingerprint(stage.layers) if known is not None and reads.note(stage.layers, known) else layers

    def _after_trace(self, stage: Stage, before: Hashable) -> Hashable:
        """The fingerprint with what the trace showed that forward reads."""
        layers = fingerprint(stage.layers)
        if layers != before:
            self._reads[before] = [r for layer in stage.layers if (r := reads.reads_of(layer)) is not None]
            for key in [key for key in self._kinds if key[0] == before]:
                self._kinds[(layers, *key[1:])] = self._kinds.pop(key)
            for modes in [key[1] for key in self._times if key[0] == before]:
                self._times[layers, modes] += self._times.pop((before, modes))
        return layers

    def _trace_as_it_is(
        self, kind: _Kind, stage: Stage, inputs: Boundary, arrivals: Arrivals
    ) -> Joint | Untraceable:
        self.num_traces += 1
        joint = trace(stage.layers, _examples(inputs), arrivals, inputs.structure, _setting(stage, inputs))
        if isinstance(joint, Joint) and len(kind.samples) < 2:
            kind.samples.append(_sample(inputs, arrivals, joint))
        return joint

    def _write_out(self, kind: _Kind, stage: Stage, inputs: Boundary, arrivals: Arrivals) -> Joint | None:
        """The graph as a template has it, if there is one; it is made when two shapes have been traced."""
        shapes, strides = [s.shape for s in inputs.tensors], [s.strides for s in inputs.tensors]
        if kind.template is not None:
            joint = kind.template.write_out(shapes, strides, arrivals)
            if joint is not None:
                self.num_written += 1
                return joint
        if len(kind.samples) < 2 or kind.num_attempts == _ATTEMPTS:
            return None
        seen = [sample.shapes for sample in kind.samples] + [tuple(shapes)]
        varying = [
            [len(set(sizes)) > 1 for sizes in zip(*each, strict=True)] for each in zip(*seen, strict=True)
        ]
        sizes = [size for shape, dims in zip(shapes, varying, strict=True) for size in compress(shape, dims)]
        if min(sizes, default=0) < 2:
            return None  # PyTorch takes sizes of 0 and 1 for special
        kind.num_attempts += 1
        self.num_traces += 1
        found = trace_symbolic(
            stage.layers, _examples(inputs), arrivals, inputs.structure, _setting(stage, inputs), varying
        )
        if found is None:
            return None
        template = Template(*found)
        again = [(s.joint, template.write_out(s.shapes, s.strides, s.arrivals)) for s in kind.samples]
        known = [equal(joint, written) for joint, written in again if written is not None]
        joint = template.write_out(shapes, strides, arrivals)
        if not known or not all(known) or joint is None:
            return None
        kind.template = template
        self.num_written += 1
        return joint


@overload
def sent(spec: Spec, sender: Stage, receiver: Stage) -> Spec: ...


@overload
def sent(spec: Spec | None, sender: Stage, receiver: Stage) -> Spec | None: ...


def sent(spec: Spec | None, sender: Stage, receiver: Stage) -> Spec | None:
    """What a tensor is when it has crossed: between devices every one is copied to the receiver's."""
    if spec is None or sender.device == receiver.device:
        return spec
    return replace(spec, device=receiver.device)


def _tensors_of(skips: Sequence[int], boundary: Boundary) -> Iterator[tuple[int, int]]:
    """The places of skip connections among the tensors of a boundary, and their numbers; but for None."""
    tensors = (number for number, is_tensor in zip(skips, boundary.skips, strict=True) if is_tensor)
    return enumerate(tensors, boundary.num_plain)


def _setting(stage: Stage, inputs: Boundary) -> Setting:
    pops, stashes = stage.keys(stage.pops), stage.keys(stage.stashes)
    return Setting(pops, inputs.skips, stashes, stage.deferred, stage.device)


def _examples(inputs: Boundary) -> list[Tensor]:
    return [spec.example() for spec in inputs.tensors]


def _sample(inputs: Boundary, arrivals: Arrivals, joint: Joint) -> Sample:
    specs = inputs.tensors
    return Sample(tuple(s.shape for s in specs), tuple(s.strides for s in specs), arrivals, joint)


def _kind_of(inputs: Boundary, arrivals: Arrivals) -> Hashable:
    """All but the sizes."""
    return (
        inputs.structure,
        inputs.skips,
        tuple((len(s.shape), s.dtype, s.device, s.requires_grad) for s in inputs.tensors),
        tuple((i, None if strides is None else layout_of(strides)) for i, strides in arrivals),
    )


def arrivals_of(joint: Joint, gradients: Gradients) -> Arrivals:
    """The gradients of a stage's outputs that come otherwise than its trace assumes, or not at all."""
    # Strides of dimensions of size one count: they tell channels_last from contiguous.
    return tuple(
        (index, gradients.get(index))
        for index, tangent in joint.of(Role.TANGENT).items()
        if gradients.get(index) != tangent.meta["val"].stride()
    )


def _joined(outputs: Sequence[tuple[Spec, ...]], dim: int, count: int) -> list[Gradients]:
    """Strides of each micro-batch's part of the module's outputs; losses lay gradients out like these."""
    found: list[Gradients] = [{} for _ in outputs]
    for index in range(min(len(specs) for specs in outputs)):
        parts = [specs[index].on_meta() for specs in outputs]
        # What cannot be joined is refused later, with its shape.
        strides: tuple[int, ...] = ()
        if all(part.dim() for part in parts) and (dim == 0 or _fit(parts, dim)):
            # Along another dimension than the first, strides depend on the whole length.
            whole = [parts[0]] * ((2 if dim == 0 else count) - len(parts)) + parts
            strides = torch.cat(whole, dim).stride()
        for gradients in found:
            gradients[index] = strides
    return found


def _fit(parts: Sequence[Tensor], dim: int) -> bool:
    """Whether they can be joined along a dimension."""
    if any(not -part.dim() <= dim < part.dim() for part in parts):
        return False
    return len({part.narrow(dim, 0, 0).shape for part in parts}) == 1


def budget_of(recompute: bool) -> float:
    """The share of activations that a micro-batch saves."""
    return FULL_RECOMPUTE if recompute else NO_RECOMPUTE

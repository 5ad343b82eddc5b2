"""The compiler: from stages and boundary specs to compiled stages. Equal stages are traced only once."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import overload

import torch
from torch import Tensor

from gpipe_fast.lower.accumulation import Accumulation
from gpipe_fast.runtime.compiled import Arrived, Cache, CompiledStage, Gradients, Place, Traced
from gpipe_fast.runtime.stage import Boundary, Modes, Spec, Stage
from gpipe_fast.trace import reads
from gpipe_fast.trace.arrival import Arrivals, layout_of
from gpipe_fast.trace.fingerprint import fingerprint
from gpipe_fast.trace.reads import Reads
from gpipe_fast.trace.refuse import Untraceable
from gpipe_fast.trace.symbolic import Sample, Template, equal
from gpipe_fast.trace.trace import Joint, Setting, trace, trace_symbolic


@dataclass(frozen=True)
class Refusal:
    """The result for a pipeline that cannot be compiled: the first untraceable stage, and the reason."""

    stage_index: int
    untraceable: Untraceable


# The maximum number of traces of a stage, for shapes or constants that no template covers.
TRACES = 64
# The maximum number of symbolic traces for stages that differ only in sizes.
_ATTEMPTS = 3


class TooManyTraces(Untraceable):
    """The reason not to trace a stage that has been traced for too many shapes or constants already."""


@dataclass
class _Kind:
    """A stage for inputs that differ only in sizes.

    Attributes:
        samples: the first two traces.
        template: a symbolic trace for all sizes; None if there is none yet.
        num_attempts: the number of attempts to make a template.
    """

    samples: list[Sample] = field(default_factory=list)
    template: Template | None = None
    num_attempts: int = 0


class Compiler:
    """A compiler of pipelines, with caches of traces, templates and compiled stages.

    Attributes:
        num_traces: the number of traces so far.
        num_written: the number of graphs written out from a template instead of traced.
    """

    def __init__(self, limit: int = 128, most: int | None = None) -> None:
        """Makes a compiler with empty caches.

        Args:
            limit: the maximum number of cached traces; the least recently used are dropped.
            most: the maximum number of traces without symbols of one stage in equal modes; None for no limit.
        """
        self.num_traces = self.num_written = 0
        self._limit = limit
        self._most = most
        self._times: Counter[tuple[Hashable, Modes]] = Counter()
        # By fingerprint, the Python state that the layers read during their first trace.
        self._reads: OrderedDict[Hashable, list[Reads]] = OrderedDict()
        self._traces: OrderedDict[Hashable, Traced] = OrderedDict()
        self._kinds: OrderedDict[tuple[Hashable, Hashable, Modes], _Kind] = OrderedDict()
        self._compiled: Cache[tuple[Place, Arrivals], CompiledStage] = Cache(4 * limit)

    def compile(
        self, stages: Sequence[Stage], microbatches: Sequence[Boundary]
    ) -> list[list[CompiledStage]] | Refusal:
        """Compiles all stages for the micro-batches of a mini-batch, under the calling thread's modes.

        Assumes that every boundary gradient arrives in the layout of its boundary activation.

        Args:
            stages: the pipeline.
            microbatches: the inputs of the first stage, each distinct spec once, in order.
        """
        pipelines: list[list[CompiledStage]] = []
        for inputs in microbatches:
            compiled: list[CompiledStage] = []
            stashed: dict[int, tuple[Spec | None, Stage]] = {}
            for index, stage in enumerate(stages):
                inputs = inputs.with_skips([sent(*stashed.pop(number), stage) for number in stage.pops])
                found = self.compiled(stage, Place.of(stage, inputs, Modes.now()))
                if isinstance(found, Untraceable):
                    return Refusal(index, self.blamed(stage, inputs, found))
                compiled.append(found)
                inputs, skips = found.outputs.apart()
                stashed.update({n: (spec, stage) for n, spec in zip(stage.stashes, skips, strict=True)})
                if index + 1 < len(stages):
                    tensors = tuple(sent(spec, stage, stages[index + 1]) for spec in inputs.tensors)
                    inputs = replace(inputs, tensors=tensors)
            pipelines.append(compiled)
        return pipelines

    def expecting(
        self,
        pipelines: Sequence[Sequence[CompiledStage]],
        arrived: Arrived,
        join_along: int = 0,
        num_microbatches: int = 2,
    ) -> list[list[CompiledStage]] | Refusal:
        """Compiles pipelines for the latest gradient layouts, or else for the likely ones.

        Args:
            pipelines: pipelines compiled for gradients in the layouts of their stages' outputs.
            arrived: the history of gradient layouts.
            join_along: the dimension along which outputs are joined.
            num_microbatches: M; only the last micro-batch may differ in shape from the first.
        """
        outputs = [compiled[-1].outputs.tensors for compiled in pipelines]
        joined = _joined(outputs, join_along, num_microbatches)
        found: list[list[CompiledStage]] = []
        for compiled, gradients in zip(pipelines, joined, strict=True):
            pipeline = self._expecting(compiled, gradients, arrived)
            if isinstance(pipeline, Refusal):
                return pipeline
            found.append(pipeline)
        return found

    def _expecting(
        self, compiled: Sequence[CompiledStage], gradients: Gradients, arrived: Arrived
    ) -> list[CompiledStage] | Refusal:
        """Propagates gradient layouts from the last stage to the first, and compiles each stage for them."""
        found = list(compiled)
        of_skips: dict[int, tuple[int, ...]] = {}
        for index, base in reversed(list(enumerate(compiled))):
            stashes = _tensors_of(base.stage.stashes, base.outputs)
            gradients.update({place: of_skips[number] for place, number in stashes if number in of_skips})
            known = self.compiled(base.stage, base.place, arrived.find(base.place) or gradients)
            if isinstance(known, Untraceable):
                layer = len(base.stage.layers) - 1 if known.layer is None else known.layer
                return Refusal(index, replace(known, layer=layer))
            found[index] = known
            gradients = known.input_gradients()
            for place, number in _tensors_of(base.stage.pops, base.inputs):
                if place in gradients:
                    of_skips[number] = gradients.pop(place)
        return found

    def compiled(
        self, part: Stage, place: Place, gradients: Gradients | None = None, limited: bool = True
    ) -> CompiledStage | Untraceable:
        """Returns a compiled stage or part of a stage. The calling thread's modes must equal the key's.

        Args:
            part: the layers to compile.
            place: the segment key to compile them for.
            gradients: the strides of the outputs' gradients; None for the outputs' own strides.
            limited: whether the limit on traces applies.
        """
        base = self._compiled.find((place, ()))
        if base is None:
            traced = self.trace(part, place.arriving, (), limited)
            if isinstance(traced, Untraceable):
                return traced
            # The trace may have revealed more Python state that the layers read.
            place = Place.of(part, place.arriving, place.modes)
            base = self._compiled.find((place, ())) or CompiledStage(part, place, traced)
            self._compiled[place, ()] = base
        arrivals = () if gradients is None else base.arrivals(gradients)
        found = base if not arrivals else self._compiled.find((place, arrivals))
        if found is None:
            traced = self.trace(part, place.arriving, arrivals, limited)
            if isinstance(traced, Untraceable):
                return traced
            found = self._compiled[place, arrivals] = CompiledStage(part, place, traced, base)
        return found

    def find(self, place: Place, gradients: Gradients) -> CompiledStage | None:
        """Returns the cached compiled stage, or None."""
        base = self._compiled.find((place, ()))
        return None if base is None else self._compiled.find((place, base.arrivals(gradients)))

    def blamed(self, stage: Stage, inputs: Boundary, untraceable: Untraceable) -> Untraceable:
        """Returns the reason with a layer: bisects for the untraceable layer if the trace named none."""
        if untraceable.layer is not None or isinstance(untraceable, TooManyTraces):
            return untraceable
        good, bad = 0, len(stage.layers)
        while bad - good > 1:
            middle = (good + bad) // 2
            part = stage.part(0, middle)
            is_bad = isinstance(self.trace(part, stage.narrowed(inputs, part), ()), Untraceable)
            good, bad = (good, middle) if is_bad else (middle, bad)
        return replace(untraceable, layer=bad - 1)

    def trace(
        self, stage: Stage, inputs: Boundary, arrivals: Arrivals, limited: bool = True
    ) -> Traced | Untraceable:
        """Traces a stage under the calling thread's modes, or returns the cached trace.

        Args:
            stage: the layers to trace.
            inputs: the specs of the stage's inputs.
            arrivals: the outputs whose gradients arrive in another layout than the output's, or not at all.
            limited: whether the limit on traces applies.
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
            if limited and self._most is not None and self._times[layers, modes] >= self._most:
                return TooManyTraces(None, f"it was traced {self._most} times for different inputs")
            found = self._trace_as_it_is(kind, stage, inputs, arrivals)
            if isinstance(found, Untraceable):
                # The reason may be these inputs, so the attempt does not count for other calls.
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
        """Returns the fingerprint of a stage's layers, including state that equal layers read when traced."""
        layers = fingerprint(stage.layers)
        known = self._reads.get(layers)
        return fingerprint(stage.layers) if known is not None and reads.note(stage.layers, known) else layers

    def _after_trace(self, stage: Stage, before: Hashable) -> Hashable:
        """Returns the fingerprint after a trace, and moves cache entries to it if the trace changed it."""
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
        """Traces a stage for these sizes, without symbols, and keeps the trace as a sample."""
        self.num_traces += 1
        joint = trace(stage.layers, _examples(inputs), arrivals, inputs.structure, _setting(stage, inputs))
        if isinstance(joint, Joint) and len(kind.samples) < 2:
            kind.samples.append(_sample(inputs, arrivals, joint))
        return joint

    def _write_out(self, kind: _Kind, stage: Stage, inputs: Boundary, arrivals: Arrivals) -> Joint | None:
        """Returns the graph that the template gives for these sizes, or None.

        The template is made here, by a symbolic trace, once two sizes have been traced.
        """
        shapes, strides = [s.shape for s in inputs.tensors], [s.strides for s in inputs.tensors]
        if kind.template is not None:
            joint = kind.template.write_out(shapes, strides, arrivals)
            if joint is not None:
                self.num_written += 1
                return joint
        varying = _varying([*(sample.shapes for sample in kind.samples), tuple(shapes)])
        sizes = [size for shape, dims in zip(shapes, varying, strict=True) for size in compress(shape, dims)]
        # PyTorch specializes symbolic traces on sizes of 0 and 1.
        if len(kind.samples) < 2 or kind.num_attempts == _ATTEMPTS or min(sizes, default=0) < 2:
            return None
        kind.num_attempts += 1
        self.num_traces += 1
        found = trace_symbolic(
            stage.layers, _examples(inputs), arrivals, inputs.structure, _setting(stage, inputs), varying
        )
        if found is None:
            return None
        template = Template(*found)
        joint = template.write_out(shapes, strides, arrivals)
        if joint is None or not _agrees(template, kind.samples):
            return None
        kind.template = template
        self.num_written += 1
        return joint


def _varying(seen: Sequence[Sequence[Sequence[int]]]) -> list[list[bool]]:
    """Returns, for each tensor, which dimensions differ between calls, given the shapes in each call."""
    return [[len(set(sizes)) > 1 for sizes in zip(*each, strict=True)] for each in zip(*seen, strict=True)]


def _agrees(template: Template, samples: Sequence[Sample]) -> bool:
    """Returns whether a template reproduces the sample traces; at least one must be within its range."""
    again = [(s.joint, template.write_out(s.shapes, s.strides, s.arrivals)) for s in samples]
    known = [equal(joint, written) for joint, written in again if written is not None]
    return bool(known) and all(known)


@overload
def sent(spec: Spec, sender: Stage, receiver: Stage) -> Spec: ...


@overload
def sent(spec: Spec | None, sender: Stage, receiver: Stage) -> Spec | None: ...


def sent(spec: Spec | None, sender: Stage, receiver: Stage) -> Spec | None:
    """Returns a tensor's spec at the receiver: a transfer between devices changes the device alone."""
    if spec is None or sender.device == receiver.device:
        return spec
    return replace(spec, device=receiver.device)


def _tensors_of(skips: Sequence[int], boundary: Boundary) -> Iterator[tuple[int, int]]:
    """Yields, for each skip tensor that is not None, its index in the boundary and its skip's number."""
    tensors = (number for number, is_tensor in zip(skips, boundary.skips, strict=True) if is_tensor)
    return enumerate(tensors, boundary.num_plain)


def _setting(stage: Stage, inputs: Boundary) -> Setting:
    """Returns the context of the stage's layers in a trace: its skip connections, batch norm and device."""
    pops, stashes = stage.keys(stage.pops), stage.keys(stage.stashes)
    return Setting(pops, inputs.skips, stashes, stage.deferred, stage.device)


def _examples(inputs: Boundary) -> list[Tensor]:
    return [spec.example() for spec in inputs.tensors]


def _sample(inputs: Boundary, arrivals: Arrivals, joint: Joint) -> Sample:
    specs = inputs.tensors
    return Sample(tuple(s.shape for s in specs), tuple(s.strides for s in specs), arrivals, joint)


def _kind_of(inputs: Boundary, arrivals: Arrivals) -> Hashable:
    """Returns everything about the inputs and their gradients except sizes."""
    return (
        inputs.structure,
        inputs.skips,
        tuple((len(s.shape), s.dtype, s.device, s.requires_grad) for s in inputs.tensors),
        tuple((i, None if strides is None else layout_of(strides)) for i, strides in arrivals),
    )


def _joined(outputs: Sequence[tuple[Spec, ...]], dim: int, count: int) -> list[Gradients]:
    """Returns, for each distinct micro-batch, the strides of its slices of the module's joined outputs.

    A loss usually produces gradients in this layout.
    """
    found: list[Gradients] = [{} for _ in outputs]
    for index in range(min(len(specs) for specs in outputs)):
        parts = [specs[index].on_meta() for specs in outputs]
        # A later check raises for outputs that cannot be joined, with their shapes.
        strides: tuple[int, ...] = ()
        if all(part.dim() for part in parts) and (dim == 0 or _fit(parts, dim)):
            # Unless outputs are joined along dimension 0, the strides depend on the total length.
            whole = [parts[0]] * ((2 if dim == 0 else count) - len(parts)) + parts
            strides = torch.cat(whole, dim).stride()
        for gradients in found:
            gradients[index] = strides
    return found


def _fit(parts: Sequence[Tensor], dim: int) -> bool:
    """Returns whether tensors can be concatenated along a dimension."""
    if any(not -part.dim() <= dim < part.dim() for part in parts):
        return False
    return len({part.narrow(dim, 0, 0).shape for part in parts}) == 1

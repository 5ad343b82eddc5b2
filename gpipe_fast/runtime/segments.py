"""The one place that searches: from what reaches a layer, or comes back to it, to the segment that takes it.

A stage is a chain of segments: runs of layers that are lowered, and between them those that cannot be::

    stage 1    [ 2  3 ]─▶( 4 )─▶[ 5  6  7 ]        layer 4 in Python
                   lowered     lowered, for what layer 4 returned

Where all stages can be lowered the chains are known before a mini-batch runs. Else they are found while it
runs, since what a layer in Python returns shows only then, and every micro-batch remembers its chain: where
the next mini-batch brings the same, nothing is searched, and lowered segments run without Python.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpipe_fast import _extension
from gpipe_fast._extension import Interpreted, PythonSegment, Segment
from gpipe_fast.layers.title import title
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE, Share
from gpipe_fast.runtime.compile import Compiler, TooManyTraces
from gpipe_fast.runtime.compiled import REMEMBERED, Arrived, Cache, CompiledStage, Place
from gpipe_fast.runtime.eager import EagerLayers
from gpipe_fast.runtime.plan import Stashed
from gpipe_fast.runtime.stage import TURN, Boundary, Modes, Spec, Stage, choosing, intra_op_threads, under
from gpipe_fast.trace.refuse import Untraceable
from gpipe_fast.uncompiled import uncompiled

# Tells of a stage why one of its layers, or all for a shape, run in Python.
Report = Callable[[int | None, str], None]

_Wanted = tuple[Place, Share]


# Plans refer to segments, and segments to layers in Python, from where no cycle would be found: so those do
# not refer back to what made them, and call these.
def _want(wanted: dict[_Wanted, None], found: threading.Event, place: Place, share: Share) -> None:
    wanted[place, share] = None
    found.set()


def _blame(in_python: set[int], report: Report, layer: int, reason: str) -> None:
    if layer not in in_python:
        in_python.add(layer)
        report(layer, reason)


@dataclass(frozen=True)
class Shared:
    """What the stages of a module have in common.

    Attributes:
        compiler: of all stages.
        arrived: in which layouts gradients came.
        interpreted: of the pipeline.
        found: set when there is something to lower.
        busy: the locks of all stages, in order.
    """

    compiler: Compiler
    arrived: Arrived
    interpreted: Interpreted
    found: threading.Event
    busy: Sequence[threading.RLock]


class Segments:
    """One stage's segments, for all signatures.

    Where chains are not known, what comes to a layer for the first time runs in Python; then it is known what
    to trace, and for which gradients, and no layer runs while it is traced.
    """

    def __init__(
        self, stage: Stage, name: str, shared: Shared, report: Report, busy: threading.RLock
    ) -> None:
        """Makes one.

        Args:
            stage: the stage.
            name: what errors call it.
            shared: with the other stages.
            report: called when a layer turns out to run in Python.
            busy: held by layers while they run in Python, and while they are traced; the same one for stages
                that share parameters, whose hooks are put aside for backwards.
        """
        self.stage = stage
        self.name = name
        self.in_python: set[int] = set()
        self._shared = shared
        self._report = report
        self._busy = busy
        self._lowered: Cache[tuple[Place, Share], Segment] = Cache(REMEMBERED)
        self._interpreted: Cache[Hashable, Segment] = Cache(REMEMBERED)
        # What was found and is not lowered yet.
        self._wanted: dict[_Wanted, None] = {}

    def find(
        self,
        layer: int,
        boundary: _extension.Boundary,
        stashed: Stashed,
        share: Share,
        modes: Modes,
        suspects: Mapping[int, str],
    ) -> Segment:
        """The segment for what comes to a layer, and what is stashed of each skip connection.

        Layers that are suspected, for a reason, run in Python, and are blamed once they have.
        """
        in_python = {*self.in_python, *suspects}
        end = min((p for p in in_python if p >= layer), default=len(self.stage.layers))
        if end == layer:
            return self.run_in_python(layer, layer + 1, share, modes, blamed=suspects.get(layer))
        part = self.stage.part(layer, end)
        arriving = _described(boundary, [stashed[number] for number in part.pops])
        if arriving is None:
            return self.run_in_python(layer, layer + 1, share, modes)
        place = Place.of(part, arriving, modes)
        found = self._lowered.find((place, share))
        return self.run_in_python(layer, end, share, modes, place) if found is None else found

    def hold(self, held: contextlib.ExitStack) -> bool:
        """Keeps layers from being run in Python while something is held; False if they are now."""
        if not self._busy.acquire(blocking=False):
            return False
        held.callback(self._busy.release)
        return True

    def lower_wanted(self) -> None:
        """Lowers what was found, unless another thread runs layers now."""
        with contextlib.ExitStack() as held:
            while self._wanted:
                if not self.hold(held):
                    self._shared.found.set()
                    return
                place, share = next(iter(self._wanted))
                del self._wanted[place, share]
                part = self._part(place)
                as_before = Modes.now().process_wide() == place.modes.process_wide()
                if as_before and place.is_current(part.layers):
                    self._lower(part, place, share)
                held.close()

    def _part(self, place: Place) -> Stage:
        begin = place.first_layer - self.stage.first_layer
        return self.stage.part(begin, begin + place.num_layers)

    def _lower(self, part: Stage, place: Place, share: Share) -> None:
        """Lowers a run of layers, or blames one of them, without which the next run is found."""
        with _under(place.modes):
            compiler = self._shared.compiler
            found = compiler.compiled(part, place, self._shared.arrived.find(place))
            if isinstance(found, CompiledStage):
                self._lowered[found.place, share] = found.segment(share)
            elif isinstance(found, TooManyTraces):
                self._report(None, f"{self._named(part)}: {found.reason}")
            else:
                found = compiler.blamed(part, place.arriving, found)
                assert found.layer is not None
                begin = place.first_layer - self.stage.first_layer
                _blame(self.in_python, self._report, begin + found.layer, found.reason)

    def stand_in(self, origin: tuple[Stage, Place], tangents: Sequence[Tensor | None]) -> Segment:
        """The segment that takes gradients that came to the outputs of another; it recomputes everything.

        The next forward expects what came. Equal gradients share one segment.

        Raises:
            RuntimeError: the layers were changed since.
        """
        part, place = origin
        gradients = self._shared.arrived.note(place, tangents)
        for other, share in list(self._lowered):
            if other == place:  # for other gradients
                _want(self._wanted, self._shared.found, place, share)
        compiled = self._shared.compiler.find(place, gradients)
        if compiled is None:
            # No layer runs in any stage while one is traced. Those that do may wait for their turn, inside of
            # their forward: so that comes last.
            with contextlib.ExitStack() as held:
                for lock in (*self._shared.busy, TURN):
                    held.enter_context(lock)
                compiled = self._compile_now(part, place)
        return compiled.segment(FULL_RECOMPUTE)

    def _compile_now(self, part: Stage, place: Place) -> CompiledStage:
        if not place.is_current(part.layers):
            raise RuntimeError(
                f"the module was changed between forward and backward, and {self.name} got gradients "
                "laid out otherwise than before; call the module again"
            )
        with _under(place.modes):
            found = self._shared.compiler.compiled(part, place, self._shared.arrived[place], limited=False)
        if isinstance(found, Untraceable):
            raise RuntimeError(f"{self.name} cannot be traced for the gradients that came: {found.reason}")
        return found

    def run_in_python(
        self,
        begin: int,
        end: int,
        share: Share,
        modes: Modes,
        place: Place | None = None,
        blamed: str | None = None,
        after: Callable[[], object] | None = None,
    ) -> Segment:
        """The segment of layers as they are.

        Args:
            begin: the first of them.
            end: behind the last.
            share: of the activations that it saves.
            modes: PyTorch's global modes.
            place: what they are to be lowered for, once they have run.
            blamed: why the layer, the only one, is blamed once it has run.
            after: called once they have run.
        """
        part = self.stage.part(begin, end)
        parameters, buffers = part.parameters(), part.buffers()
        key = (begin, end, share, modes, tuple(parameters), tuple(buffers), place, blamed, after)
        found = self._interpreted.find(key)
        if found is not None:
            return found
        shared, note = self._shared, None
        if place is not None:
            after = functools.partial(_want, self._wanted, shared.found, place, share)
            note = functools.partial(shared.arrived.note, place)
        elif blamed is not None:
            after = functools.partial(_blame, self.in_python, self._report, begin, blamed)
        found = self._interpreted[key] = PythonSegment(
            layers=EagerLayers(part, self._named(part), modes, share, self._busy, note, after),
            interpreted=shared.interpreted,
            begin=begin,
            end=end,
            pops=part.pops,
            stashes=part.stashes,
            parameters=parameters,
            buffers=buffers,
            provisional=place is not None,
        )
        return found

    def _named(self, part: Stage) -> str:
        first, last = part.first_layer, part.first_layer + len(part.layers) - 1
        if first == last:
            return f"{self.name}, {title(first, part.layers[0])}"
        return f"{self.name}, layers {first} to {last}"


@dataclass(frozen=True)
class Search:
    """Finds the segments of one stage for the mini-batches of one signature.

    Attributes:
        segments: the stage's.
        modes: PyTorch's global modes.
        shares: for each micro-batch, the share of activations that it saves.
        eager: lower nothing.
        suspects: layers that could not be traced, and why.
        after: called once a run of layers that is not lowered has run.
    """

    segments: Segments
    modes: Modes
    shares: Sequence[Share]
    eager: bool = False
    suspects: Mapping[int, str] = field(default_factory=dict)
    after: Callable[[], object] | None = None

    def find(self, layer: int, microbatch: int, boundary: _extension.Boundary, stashed: Stashed) -> Segment:
        """The segment for what comes to a layer of the stage, and what is stashed."""
        share, end = self.shares[microbatch], len(self.segments.stage.layers)
        if self.eager:
            return self.segments.run_in_python(layer, end, share, self.modes, after=self.after)
        return self.segments.find(layer, boundary, stashed, share, self.modes, self.suspects)

    # A backward within a compiled function calls it, and Dynamo would trace what makes segments.
    @uncompiled
    def stand_in(self, origin: tuple[Stage, Place], tangents: Sequence[Tensor | None]) -> Segment:
        """The segment for gradients that came to the outputs of another."""
        return self.segments.stand_in(origin, tangents)


@contextlib.contextmanager
def _under(modes: Modes) -> Iterator[None]:
    """Under what a place is compiled for, but for determinism, which is the process's."""
    with (
        torch.set_grad_enabled(modes.grad),
        under(modes.autocast),
        intra_op_threads(modes.num_threads),
        choosing(modes),
    ):
        yield


def _described(boundary: _extension.Boundary, popped: Stashed) -> Boundary | None:
    """What crosses, if it is something that can be traced for."""
    form = boundary.form
    if any(
        type(t) is not Tensor or t.layout is not torch.strided or t.is_conj() or t.is_neg() or t.is_quantized
        for t in (*boundary.tensors, *(skip for skip, _ in popped if skip is not None))
    ):
        return None
    specs = (Spec.of(t, needs) for t, needs in zip(boundary.tensors, form.needs_gradient, strict=True))
    skips = [None if skip is None else Spec.of(skip, needs) for skip, needs in popped]
    return Boundary(tuple(specs), form.structure).with_skips(skips)

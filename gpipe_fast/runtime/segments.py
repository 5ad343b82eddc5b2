"""The search for segments: maps boundary tensors, or gradients, at a layer to the segment that takes them.

A stage is a chain of segments: lowered runs of layers, and between them layers that cannot be lowered::

    stage 1    [ 2  3 ]─▶( 4 )─▶[ 5  6  7 ]        layer 4 in Python
                   lowered     lowered, for the outputs of layer 4

If all stages can be lowered, their chains are known before a mini-batch runs. Otherwise they are found at run
time, because the outputs of a layer in Python are known only then. Every micro-batch caches its chain: if the
next mini-batch has equal boundary tensors, no search takes place, and lowered segments run without Python.
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

# Reports that a layer of a stage runs in Python (None: all layers, for new inputs), and the reason.
Report = Callable[[int | None, str], None]

_Wanted = tuple[Place, Share]


# Plans hold segments in C++, and segments hold layers in Python. Python's garbage collector does not see
# references held by C++, and would not free a cycle. So layers in Python do not refer to the `Segments` that
# made them, and call these functions instead.
def _want(wanted: dict[_Wanted, None], found: threading.Event, place: Place, share: Share) -> None:
    wanted[place, share] = None
    found.set()


def _blame(in_python: set[int], report: Report, layer: int, reason: str) -> None:
    if layer not in in_python:
        in_python.add(layer)
        report(layer, reason)


@dataclass(frozen=True)
class Shared:
    """State that all stages of a module share.

    Attributes:
        compiler: the compiler.
        arrived: the history of gradient layouts.
        interpreted: the pipeline's registry of workers that are running Python.
        found: set when there are layers to lower.
        busy: the locks of all stages, in order.
    """

    compiler: Compiler
    arrived: Arrived
    interpreted: Interpreted
    found: threading.Event
    busy: Sequence[threading.RLock]


class Segments:
    """The cache of one stage's segments, for all signatures.

    If chains are not known, layers run in Python for inputs that they have not received before. That run
    shows for which inputs and gradients to trace the layers. The trace follows later, while no layer runs.
    """

    def __init__(
        self, stage: Stage, name: str, shared: Shared, report: Report, busy: threading.RLock
    ) -> None:
        """Makes an empty cache.

        Args:
            stage: the stage.
            name: the stage's name in error messages.
            shared: state shared with the other stages.
            report: called when a layer is found to be untraceable.
            busy: a lock held while layers run in Python, and while they are traced. Stages that share
                parameters share the lock, because a backward temporarily removes the parameters' hooks.
        """
        self.stage = stage
        self.name = name
        self.in_python: set[int] = set()
        self._shared = shared
        self._report = report
        self._busy = busy
        self._lowered: Cache[tuple[Place, Share], Segment] = Cache(REMEMBERED)
        self._interpreted: Cache[Hashable, Segment] = Cache(REMEMBERED)
        # The runs of layers to lower, in order of discovery.
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
        """Returns the segment that runs `layer` for these boundary tensors and stashed skip tensors.

        Suspects, layers with the reason why a trace failed, run in Python. A suspect that has run without an
        error is reported, and runs in Python from then on.
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
        """Acquires the stage's lock until `held` is closed; returns False if layers are running in Python."""
        if not self._busy.acquire(blocking=False):
            return False
        held.callback(self._busy.release)
        return True

    def lower_wanted(self) -> None:
        """Lowers the runs of layers found, unless another thread is running layers."""
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
        """Lowers a run of layers, or reports the untraceable layer, so that the next search splits there."""
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
        """Returns a segment for gradients that the segment from `origin` rejects; it recomputes everything.

        Records the gradients' layouts for the next forward. Gradients of equal layouts share one segment.

        Raises:
            RuntimeError: the layers were changed since the forward, or cannot be traced for the gradients.
        """
        part, place = origin
        gradients = self._shared.arrived.note(place, tangents)
        for other, share in list(self._lowered):
            if other == place:  # lowered for other gradient layouts
                _want(self._wanted, self._shared.found, place, share)
        compiled = self._shared.compiler.find(place, gradients)
        if compiled is None:
            # No layer of any stage may run during a trace. A running layer may itself wait for the tracing
            # lock inside its forward, so the tracing lock is acquired last.
            with contextlib.ExitStack() as held:
                for lock in (*self._shared.busy, TURN):
                    held.enter_context(lock)
                compiled = self._compile_now(part, place)
        return compiled.segment(FULL_RECOMPUTE)

    def _compile_now(self, part: Stage, place: Place) -> CompiledStage:
        if not place.is_current(part.layers):
            raise RuntimeError(
                f"the module was changed between forward and backward, and {self.name} received gradients "
                "in a new layout; call the module again"
            )
        with _under(place.modes):
            found = self._shared.compiler.compiled(part, place, self._shared.arrived[place], limited=False)
        if isinstance(found, Untraceable):
            raise RuntimeError(
                f"{self.name} cannot be traced for the gradients received: {found.reason}; pass "
                "backend='eager' to GPipe to run all layers in Python"
            )
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
        """Returns the segment that runs layers in Python.

        Args:
            begin: index of the first layer in the stage.
            end: index after the last layer.
            share: the fraction of activations to save.
            modes: PyTorch's modes.
            place: the segment key to lower the layers for, after they have run.
            blamed: the reason to report for the single layer, after it has run.
            after: called after the layers have run, unless `place` or `blamed` is given.
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
    """The search for one stage's segments, for the mini-batches of one signature.

    Attributes:
        segments: the stage's segments.
        modes: PyTorch's modes.
        shares: for each micro-batch, the fraction of activations that it saves.
        eager: whether all layers run in Python.
        suspects: by layer, the reason why a trace failed.
        after: called after a forward in Python, if `eager`.
    """

    segments: Segments
    modes: Modes
    shares: Sequence[Share]
    eager: bool = False
    suspects: Mapping[int, str] = field(default_factory=dict)
    after: Callable[[], object] | None = None

    def find(self, layer: int, microbatch: int, boundary: _extension.Boundary, stashed: Stashed) -> Segment:
        """Returns the segment that runs `layer` for these boundary tensors and stashed skip tensors."""
        share, end = self.shares[microbatch], len(self.segments.stage.layers)
        if self.eager:
            return self.segments.run_in_python(layer, end, share, self.modes, after=self.after)
        return self.segments.find(layer, boundary, stashed, share, self.modes, self.suspects)

    # A backward inside a function under torch.compile calls this, and Dynamo would trace the compiler's code.
    @uncompiled
    def stand_in(self, origin: tuple[Stage, Place], tangents: Sequence[Tensor | None]) -> Segment:
        """Returns a segment for gradients that the segment from `origin` rejects."""
        return self.segments.stand_in(origin, tangents)


@contextlib.contextmanager
def _under(modes: Modes) -> Iterator[None]:
    """Sets a segment's modes for a block, except determinism and default dtype, which are process-wide."""
    with (
        torch.set_grad_enabled(modes.grad),
        under(modes.autocast),
        intra_op_threads(modes.num_threads),
        choosing(modes),
    ):
        yield


def _described(boundary: _extension.Boundary, popped: Stashed) -> Boundary | None:
    """Returns the specs of boundary tensors and popped skip tensors; None if they cannot be traced for."""
    form = boundary.form
    if any(
        type(t) is not Tensor or t.layout is not torch.strided or t.is_conj() or t.is_neg() or t.is_quantized
        for t in (*boundary.tensors, *(skip for skip, _ in popped if skip is not None))
    ):
        return None
    specs = (Spec.of(t, needs) for t, needs in zip(boundary.tensors, form.needs_gradient, strict=True))
    skips = [None if skip is None else Spec.of(skip, needs) for skip, needs in popped]
    return Boundary(tuple(specs), form.structure).with_skips(skips)

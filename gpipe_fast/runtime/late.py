"""Stages of which it shows only while they run what reaches their layers: some layer before runs in Python.

A stage is then a chain of segments, found one after the other for what comes to them: runs of layers that are
lowered, and between them those that cannot be::

    stage 1    [ 2  3 ]─▶( 4 )─▶[ 5  6  7 ]        layer 4 in Python
                   lowered     lowered, for what layer 4 returned

Every micro-batch remembers its chain: where the next mini-batch brings the same, nothing is searched, and
lowered segments run without Python.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from gpipe_fast import _extension
from gpipe_fast._extension import Interpreted, Segment
from gpipe_fast.layers.title import title
from gpipe_fast.lower.split import FULL_RECOMPUTE, NO_RECOMPUTE
from gpipe_fast.runtime.compile import CompiledStage, Compiler, Gradients, TooManyTraces, arrivals_of
from gpipe_fast.runtime.eager import EagerLayers
from gpipe_fast.runtime.plan import Stashed
from gpipe_fast.runtime.stage import TURN, Boundary, Modes, Spec, Stage, intra_op_threads, under
from gpipe_fast.trace.fingerprint import fingerprint
from gpipe_fast.trace.refuse import Untraceable

# Segments of a stage that are remembered, of each sort.
_REMEMBERED = 64

# Tells of a stage why one of its layers, or all for a shape, run in Python.
Report = Callable[[int | None, str], None]


@dataclass(frozen=True)
class _Place:
    """A run of layers and what reaches it: what is traced once."""

    begin: int
    end: int
    arriving: Boundary
    modes: Modes
    layers: Hashable  # their fingerprint


_Wanted = tuple[_Place, float]


# Plans refer to segments, and segments to layers in Python, from where no cycle would be found: so those do
# not refer back to what made them.
def _note(gradients: dict[_Place, Gradients], place: _Place, tangents: Sequence[Tensor | None]) -> None:
    gradients[place] = {i: t.stride() for i, t in enumerate(tangents) if t is not None}


def _want(wanted: dict[_Wanted, None], found: threading.Event, place: _Place, budget: float) -> None:
    wanted[place, budget] = None
    found.set()


def _blame(in_python: set[int], report: Report, layer: int, reason: str) -> None:
    if layer not in in_python:
        in_python.add(layer)
        report(layer, reason)


_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class _Cache(OrderedDict[_Key, _Value]):
    """Keeps the latest."""

    def __setitem__(self, key: _Key, value: _Value) -> None:
        super().__setitem__(key, value)
        while len(self) > _REMEMBERED:
            self.popitem(last=False)


class Remarks:
    """What runs in Python, and why. Refers to no stage.

    Attributes:
        in_python: layers that cannot be traced faithfully, counted in the whole module.
        texts: once for each layer; whoever warns of them takes them out.
        all: those, and those that are out.
    """

    def __init__(self) -> None:
        self.in_python: set[int] = set()
        self.texts: list[str] = []
        self.all: list[str] = []
        self._seen: set[tuple[int, int | None]] = set()

    def add(self, index: int, stage: Stage | None, layer: int | None, reason: str) -> None:
        """Notes that a layer of a stage, or all for what they are called with, runs in Python."""
        if (index, layer) in self._seen:
            return
        self._seen.add((index, layer))
        if stage is None or layer is None:
            where = "the module" if stage is None else f"stage {index}"
            text = (
                f"{where} runs in Python where it meets something new: {reason}, and no one trace serves "
                "all; pad inputs to fewer shapes"
            )
        else:
            self.in_python.add(stage.first_layer + layer)
            where = f"stage {index}, {title(stage.first_layer + layer, stage.layers[layer])}"
            text = f"{where} runs in Python: {reason}; other layers do not"
        self.texts.append(text)
        self.all.append(text)


class LateStage:
    """One stage's segments, for all signatures.

    What comes to a layer for the first time runs in Python; then it is known what to trace, and for which
    gradients, and no layer runs while it is traced.
    """

    def __init__(
        self,
        stage: Stage,
        name: str,
        compiler: Compiler,
        interpreted: Interpreted,
        found: threading.Event,
        report: Report,
        busy: threading.RLock,
        all_busy: Sequence[threading.RLock],
    ) -> None:
        """Makes one.

        Args:
            stage: the stage.
            name: what errors call it.
            compiler: of the module.
            interpreted: of the pipeline.
            found: set when there is something to lower.
            report: called when a layer turns out to run in Python.
            busy: held by layers while they run in Python, and while they are traced; the same one for stages
                that share parameters, whose hooks are put aside for backwards.
            all_busy: those of all stages, in order.
        """
        self.stage = stage
        self.name = name
        self.in_python: set[int] = set()
        self._compiler = compiler
        self._workers = interpreted
        self._found = found
        self._report = report
        self._lowered: _Cache[tuple[_Place, float], Segment] = _Cache()
        self._interpreted: _Cache[Hashable, Segment] = _Cache()
        # What was found and is not lowered yet.
        self._wanted: dict[_Wanted, None] = {}
        # In which layouts gradients came last to what a place hands on.
        self._gradients: _Cache[_Place, Gradients] = _Cache()
        self._busy = busy
        self._all_busy = all_busy

    def blame(self, layer: int, reason: str) -> None:
        """Lets a layer run in Python from now on."""
        _blame(self.in_python, self._report, layer, reason)

    def find(
        self,
        layer: int,
        boundary: _extension.Boundary,
        stashed: Stashed,
        budget: float,
        modes: Modes,
        suspects: Mapping[int, str],
    ) -> Segment:
        """The segment for what comes to a layer, and what is stashed of each skip connection.

        Layers that are suspected, for a reason, run in Python, and are blamed once they have.
        """
        in_python = {*self.in_python, *suspects}
        end = min((p for p in in_python if p >= layer), default=len(self.stage.layers))
        if end == layer:
            return self.run_in_python(layer, layer + 1, budget, modes, blamed=suspects.get(layer))
        pops = self.stage.part(layer, end).pops
        arriving = _described(boundary, [stashed[number] for number in pops])
        if arriving is None:
            return self.run_in_python(layer, layer + 1, budget, modes)
        place = _Place(layer, end, arriving, modes, fingerprint(self.stage.layers[layer:end]))
        found = self._lowered.get((place, budget))
        if found is None:
            found = self.run_in_python(layer, end, budget, modes, place)
        return found

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
                    self._found.set()
                    return
                place, budget = next(iter(self._wanted))
                del self._wanted[place, budget]
                part = self.stage.part(place.begin, place.end)
                deterministic = torch.are_deterministic_algorithms_enabled()
                if fingerprint(part.layers) == place.layers and place.modes.deterministic == deterministic:
                    with intra_op_threads(place.modes.num_threads):
                        self._lower(part, place, budget)
                held.close()

    def _lower(self, part: Stage, place: _Place, budget: float) -> None:
        """Lowers a run of layers, or blames one of them, without which the next run is found."""
        found = self._compile(part, place)
        if isinstance(found, TooManyTraces):
            self._report(None, f"{self._named(part)}: {found.reason}")
        elif isinstance(found, Untraceable):
            with torch.set_grad_enabled(place.modes.grad), under(place.modes.autocast):
                found = self._compiler.blamed(part, place.arriving, found)
            assert found.layer is not None
            self.blame(place.begin + found.layer, found.reason)
        else:
            # The trace may have shown that forward reads more than was known.
            place = replace(place, layers=fingerprint(part.layers))
            self._lowered[place, budget] = self._segment(part, place, budget, found)

    def _compile(self, part: Stage, place: _Place) -> CompiledStage | Untraceable:
        """Traces a run of layers for the gradients that came last."""
        with torch.set_grad_enabled(place.modes.grad), under(place.modes.autocast):
            traced = self._compiler.trace(part, place.arriving, ())
            if isinstance(traced, Untraceable):
                return traced
            compiled = CompiledStage(part, place.arriving, traced)
            if place not in self._gradients:
                return compiled
            arrivals = arrivals_of(traced.joint, self._gradients[place])
            if not arrivals:
                return compiled
            traced = self._compiler.trace(part, place.arriving, arrivals)
            if isinstance(traced, Untraceable):
                return traced
            return CompiledStage(part, place.arriving, traced, compiled.outputs)

    def _segment(self, part: Stage, place: _Place, budget: float, compiled: CompiledStage) -> Segment:
        segment = compiled.segment(budget)
        segment.set_origin((part, place))
        return segment

    def lower_instead(self, origin: tuple[Stage, _Place], tangents: Sequence[Tensor | None]) -> Segment:
        """The segment that takes gradients as they came to the outputs of another; it recomputes everything.

        Raises:
            RuntimeError: the layers were changed since.
        """
        part, place = origin
        if fingerprint(part.layers) != place.layers:
            raise RuntimeError(
                f"{self.name} was changed between forward and backward, and gradients came otherwise than "
                "before; call the module again"
            )
        _note(self._gradients, place, tangents)
        for found, budget in list(self._lowered):
            if found == place:  # for other gradients
                del self._lowered[found, budget]
        # Not in turn with the layers of other stages, which may wait for their turn inside of their forward.
        with contextlib.ExitStack() as held:
            for busy in (*self._all_busy, TURN):
                held.enter_context(busy)
            instead = self._compile(part, place)
        if isinstance(instead, Untraceable):
            raise RuntimeError(f"{self.name} cannot be traced for the gradients that came: {instead.reason}")
        return self._segment(part, place, FULL_RECOMPUTE, instead)

    def run_in_python(
        self,
        begin: int,
        end: int,
        budget: float,
        modes: Modes,
        place: _Place | None = None,
        blamed: str | None = None,
        after: Callable[[], object] | None = None,
    ) -> Segment:
        """The segment of layers as they are.

        Args:
            begin: the first of them.
            end: behind the last.
            budget: the share of activations that it saves.
            modes: PyTorch's global modes.
            place: what they are to be lowered for, once they have run.
            blamed: why the layer, the only one, is blamed once it has run.
            after: called once they have run.
        """
        part = self.stage.part(begin, end)
        parameters, buffers = part.parameters(), part.buffers()
        key = (begin, end, budget, modes, tuple(parameters), tuple(buffers), place, blamed, after)
        if place is not None:
            after = functools.partial(_want, self._wanted, self._found, place, budget)
        elif blamed is not None:
            after = functools.partial(_blame, self.in_python, self._report, begin, blamed)
        found = self._interpreted.get(key)
        if found is None:
            layers = EagerLayers(
                part,
                self._named(part),
                modes,
                budget < NO_RECOMPUTE,
                self._busy,
                None if place is None else functools.partial(_note, self._gradients, place),
                after,
            )
            found = Segment.in_python(
                begin,
                end,
                part.pops,
                part.stashes,
                layers,
                parameters,
                buffers,
                self._workers,
                place is not None,
            )
            self._interpreted[key] = found
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
        late: the stage.
        modes: PyTorch's global modes.
        budgets: for each micro-batch, the share of activations that it saves.
        eager: lower nothing.
        suspects: layers that could not be traced, and why.
        after: called once a run of layers that is not lowered has run.
    """

    late: LateStage
    modes: Modes
    budgets: Sequence[float]
    eager: bool
    suspects: Mapping[int, str] = field(default_factory=dict)
    after: Callable[[], object] | None = None

    def find(self, layer: int, microbatch: int, boundary: _extension.Boundary, stashed: Stashed) -> Segment:
        """The segment for what comes to a layer of the stage, and what is stashed."""
        budget, end = self.budgets[microbatch], len(self.late.stage.layers)
        if self.eager:
            return self.late.run_in_python(layer, end, budget, self.modes, after=self.after)
        return self.late.find(layer, boundary, stashed, budget, self.modes, self.suspects)

    def instead(
        self, origin: tuple[Stage, _Place], microbatch: int, tangents: Sequence[Tensor | None]
    ) -> Segment:
        """The segment for the gradients that came to the outputs of another."""
        return self.late.lower_instead(origin, tangents)


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

"""The search for segments: maps a layer, with its boundary tensors or gradients, to a segment.

A stage is a chain of segments: lowered runs of layers, and between them Python layers::

    stage 1    [ 2  3 ]─▶( 4 )─▶[ 5  6  7 ]        layer 4 in Python
                   lowered     lowered, for the outputs of layer 4

If all stages can be lowered, their chains are known before a mini-batch runs. Otherwise they are found at run
time, because the outputs of a Python layer are known only then. Every micro-batch caches its chain: if the
next mini-batch has equal boundary tensors, no search takes place, and lowered segments run without Python.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpipe_fast import _extension, progress
from gpipe_fast._extension import PythonSegment, PythonWorkers, Segment
from gpipe_fast.devices import intra_op_threads
from gpipe_fast.layers.structure import layer_title
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE, SavedFraction
from gpipe_fast.runtime.cache import Cache
from gpipe_fast.runtime.compile import Compiler, TooManyTraces, outside_inference_mode
from gpipe_fast.runtime.compiled import CACHE_LIMIT, CompiledStage, GradientLayoutHistory, SegmentKey
from gpipe_fast.runtime.module_warnings import ModuleWarnings, layers_title
from gpipe_fast.runtime.plan import Stashed
from gpipe_fast.runtime.python_layers import PythonLayers
from gpipe_fast.runtime.stage import (
    TRACING_LOCK,
    BoundarySpec,
    Lock,
    Stage,
    TensorSpec,
    TorchModes,
    exact_autocast,
    with_operator_settings,
)
from gpipe_fast.trace.joint_graph import named_buffers_of
from gpipe_fast.trace.traceability import Untraceable
from gpipe_fast.unsupported import uncompiled

# Reports that a layer of a stage runs in Python (None: all layers, for new inputs), and the reason.
ReportUntraceable = Callable[[int | None, str], None]

_LoweringRequest = tuple[SegmentKey, SavedFraction]


# Plans hold segments in C++, and segments hold `PythonLayers`. Python's garbage collector does not see
# references held by C++, and would not free a cycle. So `PythonLayers` do not refer to the `Segments` that
# made them, and call these functions instead.
def _request_lowering(
    requests: dict[_LoweringRequest, None],
    lowering_pending: threading.Event,
    segment_key: SegmentKey,
    saved_fraction: SavedFraction,
) -> None:
    requests[segment_key, saved_fraction] = None
    lowering_pending.set()


def _report_untraceable(
    in_python: set[int], first_layer: int, report: ReportUntraceable, layer: int, reason: str
) -> None:
    if first_layer + layer not in in_python:
        in_python.add(first_layer + layer)
        report(layer, reason)


@dataclass(frozen=True)
class SegmentSharedState:
    """State that all stages of a module share.

    Attributes:
        compiler: the compiler.
        layout_history: the history of gradient layouts.
        python_workers: the pipeline's registry of workers that are running Python.
        lowering_pending: set when there are layers to lower.
        locks: the locks of all stages, in order.
        in_python: the indices, in the whole model, of layers that are known to be untraceable.
        module_warnings: gets the layers that are found to be untraceable.
    """

    compiler: Compiler
    layout_history: GradientLayoutHistory
    python_workers: PythonWorkers
    lowering_pending: threading.Event
    locks: Sequence[Lock]
    in_python: set[int]
    module_warnings: ModuleWarnings


class StageTensors(NamedTuple):
    """The names of a stage's parameters and buffers, in the order of their indices."""

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]

    @classmethod
    def of(cls, stage: Stage) -> StageTensors:
        """Returns the names of the tensors that a stage has now."""
        layers = nn.ModuleList(stage.layers)
        parameters = tuple(name for name, _ in layers.named_parameters())
        return cls(parameters, tuple(named_buffers_of(stage.layers)))

    def indices(self, part: Stage) -> tuple[list[int], list[int]]:
        """Returns a part's parameters and buffers as indices; those registered since have none."""
        now = StageTensors.of(part.whole)

        def known(positions: list[int], now: Sequence[str], before: Sequence[str]) -> list[int]:
            return [before.index(now[i]) for i in positions if now[i] in before]

        parameters = known(part.parameters(), now.parameters, self.parameters)
        return parameters, known(part.buffers(), now.buffers, self.buffers)


class Segments:
    """The cache of one stage's segments, for all signatures.

    If chains are not known, layers run in Python for inputs that they have not received before. That run
    shows for which inputs and gradients to trace the layers. The trace follows later, while no layer runs.
    """

    def __init__(self, stage: Stage, index: int, shared: SegmentSharedState, lock: Lock) -> None:
        """Makes an empty cache.

        Args:
            stage: the stage.
            index: the stage's index.
            shared: state shared with the other stages.
            lock: a lock held while layers run in Python, and while they are traced. Stages that share
                parameters share the lock, because a backward temporarily removes the parameters' hooks.
        """
        self.stage = stage
        self.name = f"stage {index}"
        self._shared = shared
        self._report: ReportUntraceable = functools.partial(shared.module_warnings.add, index, stage)
        self._report_untraceable = functools.partial(
            _report_untraceable, shared.in_python, stage.first_layer, self._report
        )
        self._lock = lock
        self._lowered: Cache[tuple[SegmentKey, SavedFraction], Segment] = Cache(CACHE_LIMIT)
        self._python_segments: Cache[Hashable, Segment] = Cache(CACHE_LIMIT)
        # The runs of layers to lower, in order of discovery.
        self._requests: dict[_LoweringRequest, None] = {}

    def find(
        self,
        search: SegmentSearch,
        layer: int,
        saved_fraction: SavedFraction,
        boundary: _extension.Boundary,
        stashed: Stashed,
    ) -> Segment:
        """Returns the segment that runs `layer` for these boundary tensors and stashed skip tensors.

        Layers run in Python for inputs that are new, and once one of them has registered a buffer. Suspects,
        layers with the reason why a trace failed, run in Python. A suspect that has run without an error is
        reported, and runs in Python from then on.
        """
        run_in_python = functools.partial(self._run_in_python, search, saved_fraction, layer)
        first, end, suspects = self.stage.first_layer, len(self.stage.layers), search.suspects
        if search.all_in_python:
            return run_in_python(end)
        # A copy, because other threads add to it.
        in_python = {index - first for index in tuple(self._shared.in_python)} | suspects.keys()
        end = min([end, *(p for p in in_python if p >= layer)])
        if end == layer:
            return run_in_python(layer + 1, reason=suspects.get(layer))
        part = self.stage.part(layer, end)
        input_specs = _boundary_spec(boundary, [stashed[number] for number in part.pops])
        if input_specs is None:
            return run_in_python(layer + 1)
        segment_key = SegmentKey.of(part, input_specs, search.modes)
        found = self._lowered.lookup((segment_key, saved_fraction))
        if found is None or search.known != StageTensors.of(self.stage):
            return run_in_python(end, segment_key)
        return found

    def try_lock(self, held: contextlib.ExitStack) -> bool:
        """Acquires the stage's lock until `held` is closed; returns False if layers are running in Python."""
        if not self._lock.acquire(blocking=False):
            return False
        held.callback(self._lock.release)
        return True

    def lower_requested(self) -> None:
        """Lowers the requested runs of layers, unless another thread is running layers."""
        with contextlib.ExitStack() as held:
            while self._requests:
                if not self.try_lock(held):
                    self._shared.lowering_pending.set()
                    return
                segment_key, saved_fraction = next(iter(self._requests))
                del self._requests[segment_key, saved_fraction]
                begin = segment_key.first_layer - self.stage.first_layer
                part = self.stage.part(begin, begin + segment_key.num_layers)
                modes_unchanged = TorchModes.now().process_wide() == segment_key.modes.process_wide()
                if modes_unchanged:
                    self._lower(part, segment_key, saved_fraction)
                held.close()

    def not_yet_lowered(self) -> set[int]:
        """Returns the indices of the layers in the whole model that run in Python because they are new."""
        lowered = {key for (key, _), _ in self._lowered.entries()}
        new = (key for key, _ in self._requests if key not in lowered)
        return {key.first_layer + i for key in new for i in range(key.num_layers)}

    def forget(self, segment_keys: Container[SegmentKey]) -> None:
        """Removes the lowered segments with these keys; chains that contain one keep it."""
        for key, _ in self._lowered.entries():
            if key[0] in segment_keys:
                self._lowered.pop(key, None)

    def _lower(self, part: Stage, segment_key: SegmentKey, saved_fraction: SavedFraction) -> None:
        """Lowers a run of layers unless they have changed; reports its untraceable layer, if there is one."""
        shape = progress.title_of(segment_key.input_specs.tensors)
        with _tracing(part, segment_key, f"the first call with micro-batches of {shape} in this mode"):
            if not segment_key.layers.holds(part.layers):  # some guards depend on modes, such as autocast
                return
            compiler = self._shared.compiler
            try:
                found = compiler.compiled(part, segment_key, self._shared.layout_history.lookup(segment_key))
            except TooManyTraces as error:
                self._report(None, f"{self._name_of(part)}: {error.reason}")
            except Untraceable as error:
                layer = compiler.blamed(part, segment_key.input_specs, error)
                begin = segment_key.first_layer - self.stage.first_layer
                self._report_untraceable(begin + layer, error.reason)
            else:
                self._lowered[found.segment_key, saved_fraction] = found.segment(saved_fraction)
                found.traced.drop_graph()

    def fallback(self, origin: tuple[Stage, SegmentKey], tangents: Sequence[Tensor | None]) -> Segment:
        """Returns a segment for gradients that the segment from `origin` rejects; it recomputes everything.

        Records the gradients' layouts for the next forward. Gradients of equal layouts share one segment.

        Raises:
            RuntimeError: the layers were changed since the forward, or cannot be traced for the gradients.
        """
        part, segment_key = origin
        gradients = self._shared.layout_history.record(segment_key, tangents)
        for other, saved_fraction in [key for key, _ in self._lowered.entries()]:
            if other == segment_key:  # lowered for other gradient layouts
                _request_lowering(self._requests, self._shared.lowering_pending, segment_key, saved_fraction)
        compiled = self._shared.compiler.find(segment_key, gradients)
        if compiled is not None:
            return compiled.segment(FULL_RECOMPUTE)
        # No layer of any stage may run during a trace. A running layer may itself wait for the tracing lock
        # inside its forward, so the tracing lock is acquired last.
        with contextlib.ExitStack() as held:
            for lock in (*self._shared.locks, TRACING_LOCK):
                held.enter_context(lock)
            return self._compile_now(part, segment_key).segment(FULL_RECOMPUTE)

    def _compile_now(self, part: Stage, segment_key: SegmentKey) -> CompiledStage:
        shape = progress.title_of(segment_key.input_specs.tensors)
        with _tracing(part, segment_key, f"gradients in a new layout, for micro-batches of {shape}"):
            if not segment_key.layers.holds(part.layers):
                raise RuntimeError(
                    f"the module was changed between forward and backward, and {self.name} received "
                    "gradients in a new layout; call the module again"
                )
            try:
                return self._shared.compiler.compiled(
                    part, segment_key, self._shared.layout_history[segment_key], enforce_limit=False
                )
            except Untraceable as error:
                raise RuntimeError(
                    f"{self.name} cannot be traced for the gradients received: {error.reason}; pass "
                    "backend='eager' to GPipe to run all layers in Python"
                ) from None

    def _run_in_python(
        self,
        search: SegmentSearch,
        saved_fraction: SavedFraction,
        begin: int,
        end: int,
        segment_key: SegmentKey | None = None,
        reason: str | None = None,
    ) -> Segment:
        """Returns the segment that runs layers in Python.

        Args:
            search: the search.
            saved_fraction: the fraction of activations to save.
            begin: index of the first layer in the stage.
            end: index after the last layer.
            segment_key: the segment key to lower the layers for, after they have run.
            reason: the reason why the single layer is untraceable, reported after the layer has run.
        """
        part, modes, on_success = self.stage.part(begin, end), search.modes, search.on_success
        parameters, buffers = search.known.indices(part)
        tensors = tuple(parameters), tuple(buffers)
        key = (begin, end, saved_fraction, modes, tensors, segment_key, reason, on_success)
        found = self._python_segments.lookup(key)
        if found is not None:
            return found
        shared, on_tangents = self._shared, None
        if segment_key is not None:
            on_success = functools.partial(
                _request_lowering, self._requests, shared.lowering_pending, segment_key, saved_fraction
            )
            on_tangents = functools.partial(shared.layout_history.record, segment_key)
        elif reason is not None:
            on_success = functools.partial(self._report_untraceable, begin, reason)
        found = self._python_segments[key] = PythonSegment(
            layers=PythonLayers(
                part,
                self._name_of(part),
                modes,
                saved_fraction,
                self._lock,
                len(parameters),
                on_tangents,
                on_success,
            ),
            python_workers=shared.python_workers,
            begin=begin,
            end=end,
            pops=part.pops,
            stashes=part.stashes,
            parameters=parameters,
            buffers=buffers,
            single_use=segment_key is not None,
        )
        return found

    def _name_of(self, part: Stage) -> str:
        is_one = len(part.layers) == 1
        layers = layer_title(part.first_layer, part.layers[0]) if is_one else layers_title(part)
        return f"{self.name}, {layers}"


@dataclass(frozen=True)
class SegmentSearch:
    """The search for one stage's segments, for the mini-batches of one signature.

    Attributes:
        segments: the stage's segments.
        modes: PyTorch's modes.
        known: the stage's tensors when the plan was made.
        saved_fractions: for each micro-batch, the fraction of activations that it saves.
        all_in_python: whether all layers run in Python.
        suspects: by layer, the reason why a trace failed.
        on_success: called after a forward in Python, if `all_in_python`.
    """

    segments: Segments
    modes: TorchModes
    known: StageTensors
    saved_fractions: Sequence[SavedFraction]
    all_in_python: bool = False
    suspects: Mapping[int, str] = field(default_factory=dict)
    on_success: Callable[[], object] | None = None

    def find(self, layer: int, microbatch: int, boundary: _extension.Boundary, stashed: Stashed) -> Segment:
        """Returns the segment that runs `layer` for these boundary tensors and stashed skip tensors."""
        return self.segments.find(self, layer, self.saved_fractions[microbatch], boundary, stashed)

    # A backward inside a function under torch.compile calls this, and Dynamo would trace the compiler's code.
    @uncompiled
    def fallback(self, origin: tuple[Stage, SegmentKey], tangents: Sequence[Tensor | None]) -> Segment:
        """Returns a segment for gradients that the segment from `origin` rejects."""
        return self.segments.fallback(origin, tangents)


@contextlib.contextmanager
def _tracing(part: Stage, segment_key: SegmentKey, new: str) -> Iterator[None]:
    """Sets a segment's modes for a block in which it may be traced, and shows what is new about the call.

    Determinism and the default dtype stay as they are, since they are process-wide.
    """
    modes = segment_key.modes
    with (
        outside_inference_mode([part]),
        torch.set_grad_enabled(modes.grad),
        exact_autocast(modes.autocast),
        intra_op_threads(modes.num_threads),
        with_operator_settings(modes),
        progress.first_call([len(part.layers)], part.first_layer, new),
    ):
        yield


def _boundary_spec(boundary: _extension.Boundary, popped: Stashed) -> BoundarySpec | None:
    """Returns the specs of boundary tensors and popped skip tensors; None if they cannot be traced for."""
    form = boundary.form
    if any(
        type(t) is not Tensor or t.layout is not torch.strided or t.is_quantized
        for t in (*boundary.tensors, *(skip for skip, _ in popped if skip is not None))
    ):
        return None
    specs = (TensorSpec.of(t, needs) for t, needs in zip(boundary.tensors, form.needs_gradient, strict=True))
    skips = [None if skip is None else TensorSpec.of(skip, needs) for skip, needs in popped]
    return BoundarySpec(tuple(specs), form.structure).with_skips(skips)

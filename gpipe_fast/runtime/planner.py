"""The planner: makes a plan on the first call of a signature, and again only after a change."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gpipe_fast import _extension, progress
from gpipe_fast._extension import Pipeline
from gpipe_fast.devices import intra_op_threads
from gpipe_fast.layers.structure import BatchDims, Inputs, Structure, changing_number
from gpipe_fast.lower.checkpoint import Checkpoint, SavedFraction
from gpipe_fast.randomness.random import MinibatchKey, minibatch_key
from gpipe_fast.runtime.cache import Cache, limit_bytes
from gpipe_fast.runtime.compile import MAX_TRACES, Compiler, TooManyTraces, outside_inference_mode
from gpipe_fast.runtime.compiled import CompiledStage, GradientLayoutHistory, SegmentKey
from gpipe_fast.runtime.eviction import Eviction, KnownPlans
from gpipe_fast.runtime.module_warnings import InPython, ModuleWarnings, log
from gpipe_fast.runtime.plan import (
    PlannedCall,
    StepOrder,
    check_placed,
    make_plan,
    own_stages_of,
    planned_schedule,
    unfused_layers,
)
from gpipe_fast.runtime.segments import Segments, SegmentSearch, SegmentSharedState, StageTensors
from gpipe_fast.runtime.stage import TRACING_LOCK, BoundarySpec, Lock, Stage, TensorSpec, TorchModes
from gpipe_fast.runtime.state import ModuleState
from gpipe_fast.trace.joint_graph import parameters_of
from gpipe_fast.trace.layer_states import StateKey
from gpipe_fast.trace.traceability import Untraceable, check_can_run

if TYPE_CHECKING:
    from gpipe_fast.runtime.memory_limit import Choice

# The maximum number of signatures whose plans a module caches, and of plans of each, for gradients in other
# layouts.
_MAX_PLANS, _MAX_LAYOUTS = 256, 8


_BUSY = "another thread runs layers of the model; wait until its call has ended"


@dataclass(frozen=True, eq=False)
class Call:
    """A call to make a plan for.

    Attributes:
        inputs: the module's inputs; only their metadata is read.
        chunks: the maximum number of micro-batches.
        threads: intra-op threads of each stage.
        checkpoint: the fraction of activations that micro-batches save.
        state: the state of the layers.
        given: the skip tensors that the caller gives.
        order: the order of forwards and backwards of a step; None for a forward.
        slots: how many boundary tensors may wait on a connection; None for as many as the schedule allows.
    """

    inputs: Inputs
    chunks: int
    threads: int
    checkpoint: Checkpoint
    state: ModuleState
    given: tuple[Tensor, ...] = ()
    order: StepOrder | None = None
    slots: int | None = None

    def key(self) -> Signature:
        """Returns the cache key of the call's plans under the calling thread's modes."""
        inputs, state = self.inputs, self.state
        boundary = _with_given(_boundary(inputs.tensors, inputs.tensors, inputs.structure), self.given)
        return Signature(
            boundary,
            inputs.dims,
            self.chunks,
            self.threads,
            state.modes,
            state.key,
            state.devices,
            self.order,
            self.slots,
            self.checkpoint,
        )

    @functools.cached_property
    def microbatches(self) -> list[BoundarySpec]:
        """For each micro-batch, the specs of the first stage's inputs."""
        tensors, structure, dims = self.inputs
        given_dims = () if self.order is None else self.order.given_dims
        both = BatchDims((*dims.inputs, *given_dims))
        parts = both.split([x.detach() for x in (*tensors, *self.given)], self.chunks)
        count = len(tensors)
        return [_with_given(_boundary(part[:count], tensors, structure), part[count:]) for part in parts]

    @property
    def saved_fractions(self) -> list[list[SavedFraction]]:
        """For each stage, the fraction of activations that each micro-batch saves."""
        policy, number = self.checkpoint, len(self.microbatches)
        return [policy.saved_fractions(stage, number) for stage in range(len(policy.stages))]


@dataclass(frozen=True)
class Signature:
    """The cache key of plans: what the programs of a mini-batch depend on, but the layouts of gradients.

    Attributes:
        inputs: the specs of the module's inputs.
        dims: the dimensions along which inputs are split and outputs are concatenated.
        chunks: the maximum number of micro-batches.
        threads: intra-op threads of each stage.
        modes: PyTorch's modes.
        layers: the state of the layers.
        devices: the devices of their parameters and buffers.
        order: the order of forwards and backwards of a step; None for a forward.
        slots: how many boundary tensors may wait on a connection; None for as many as the schedule allows.
        checkpoint: the fraction of activations that micro-batches save.
    """

    inputs: BoundarySpec
    dims: BatchDims
    chunks: int
    threads: int
    modes: TorchModes
    layers: StateKey
    devices: tuple[torch.device, ...]
    order: StepOrder | None
    slots: int | None
    checkpoint: Checkpoint

    def changed_since(self, before: Signature) -> list[str]:
        """Returns what differs from an earlier signature, in words for the log."""
        found = [each.name for each in fields(self) if getattr(self, each.name) != getattr(before, each.name)]
        if "layers" in found:
            changed = self.layers.changed_since(before.layers)
            found[found.index("layers")] = f"the state of layers {changed}"
        return found


class Planner:
    """The cache of plans for the calls of one module.

    Attributes:
        module_warnings: warnings about layers that run in Python, and about avoidable costs.
        in_python: the indices of layers that cannot be traced faithfully.
        latest: the plan of the latest call; None before the first.
        stages: the stages.
        backend: as for `GPipe`.
        compiler: traces the stages.
        eviction: the limit on the bytes that the cache keeps.
        locks: the locks that are held while layers run in Python, in the order of stages.
        segments: the segments of each stage.
        plans: the plans, by signature.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        backend: str,
        python_workers: _extension.PythonWorkers,
        base: Planner | None = None,
    ) -> None:
        """Makes a planner.

        Args:
            stages: as above.
            backend: as above.
            python_workers: the registry of workers that are running Python.
            base: the planner of the same layers without the last one, which shares its compiler.
        """
        self.module_warnings: ModuleWarnings = ModuleWarnings() if base is None else base.module_warnings
        self._base = base
        self.in_python: set[int] = set()
        self.latest: PlannedCall | None = None
        self.stages = stages
        self.backend = backend
        self._has_remote_stages = own_stages_of(stages) is not None
        max_traces = None if backend == "aten" else MAX_TRACES
        self.compiler: Compiler = Compiler(max_traces=max_traces) if base is None else base.compiler
        self._layout_history = GradientLayoutHistory(2 * _MAX_PLANS * len(stages))
        self._lowering_pending = threading.Event()
        locks: Sequence[Lock] = _locks(stages)
        if base is not None:  # the same layers run in its calls
            shares = len(set(locks)) < len(stages)
            locks = [_AllLocks(base.locks)] * len(stages) if shares else base._locks
        self._locks: Sequence[Lock] = locks
        self.locks: Sequence[Lock] = list(dict.fromkeys(locks))
        shared = SegmentSharedState(
            self.compiler,
            self._layout_history,
            python_workers,
            self._lowering_pending,
            self.locks,
            self.in_python,
            self.module_warnings,
        )
        each = enumerate(zip(stages, locks, strict=True))
        self.segments = [Segments(stage, i, shared, lock) for i, (stage, lock) in each]
        self.plans: Cache[Signature, KnownPlans] = Cache(_MAX_PLANS)
        self._structures: Cache[Structure, None] = Cache(_MAX_PLANS)  # of the inputs of calls with a plan
        if base is None:
            parameters = (p for stage in stages for p in parameters_of(stage.layers))
            self.eviction = Eviction(limit_bytes(parameters), self.compiler)
        else:
            self.eviction = base.eviction
        self.eviction.add(self)
        # What calls save under limits in bytes, by call and limits; see memory_limit.py.
        self.within: Cache[Hashable, Choice] = Cache(_MAX_PLANS)
        # The latest key, number of changes of layouts, and plan: comparing a key is cheaper than hashing it.
        self._latest: tuple[Signature, int, PlannedCall] | None = None

    def plan(self, call: Call) -> PlannedCall:
        """Returns the plan for a call, from the cache or newly made.

        Raises:
            TypeError: the last layer returns no tensor; or, under ``backend='aten'``, a stage returns a value
                that cannot be passed to the next stage.
            RuntimeError: under ``backend='aten'``, a stage cannot be traced; the message names the layer and
                the reason.
        """
        if self._base is not None:
            self._exchange_layers_in_python(self._base)
        if self._lowering_pending.is_set():
            self._lower_requested()
            call.state.follow_captures()
        key, num_changes = call.key(), self._layout_history.num_changes
        if self._latest is not None and self._latest[:2] == (key, num_changes):
            self.latest = plan = self._latest[2]
            return plan
        known = self.plans.lookup(key)
        found = None if known is None else known.by_layouts.lookup(self._layouts(known.segment_keys))
        if found is None:
            self._log_new(key)
        plan = self._make(call) if found is None else found
        self.latest = plan
        if plan.obstacle:
            return plan
        if found is None:
            call.state.follow_captures()
            before, key = key, call.key()
            if known is None or key != before:
                keys = [stage.segment_key for stage in plan.compiled_stages()]
                self.plans[key] = known = KnownPlans(keys, Cache(_MAX_LAYOUTS))
                self._structures[call.inputs.structure] = None
            known.by_layouts[self._layouts(known.segment_keys)] = plan
            self.eviction.run(plan)
        self._latest = key, num_changes, plan
        return plan

    def _log_new(self, key: Signature) -> None:
        if self._latest is not None:
            what = ", ".join(key.changed_since(self._latest[0])) or "at most layouts of gradients"
            log.debug("a new plan; its call differs from that of the latest one in %s", what)

    def _exchange_layers_in_python(self, base: Planner) -> None:
        """Lets this planner and its base run the same layers in Python, apart from the last one here."""
        last = self.stages[-1].first_layer + len(self.stages[-1].layers) - 1
        self.in_python |= base.in_python
        base.in_python |= self.in_python - {last}

    @property
    def is_settled(self) -> bool:
        """Whether the next plan for inputs like the latest needs no trace, as far as is known."""
        return not self._lowering_pending.is_set() and not (self.latest and self.latest.obstacle)

    def _layouts(self, segment_keys: Sequence[SegmentKey]) -> Hashable:
        """Returns the latest layouts in which gradients arrived at stages."""
        found = map(self._layout_history.get, segment_keys)
        return tuple(None if strides is None else tuple(strides.items()) for strides in found)

    def _lower_requested(self) -> None:
        """Lowers the runs of layers that ran in Python because their inputs were new."""
        self._lowering_pending.clear()
        for segments in self.segments:
            segments.lower_requested()
        self.eviction.run(self.latest)

    def _make(self, call: Call) -> PlannedCall:
        """Makes a plan: traces the stages to joint graphs, and splits, fuses and lowers these to programs.

        A plan is valid for one call only if another thread is running layers, because no layer is traced
        then, or if a trace failed: the reason may be the call's inputs, for which the layer then raises.
        """
        check_placed(self.stages)
        if call.order is not None and torch.is_grad_enabled():
            # Raises before any layer is traced.
            planned_schedule(self.stages, call.saved_fractions, True, call.order)
        eager = self.backend == "eager"
        with contextlib.ExitStack() as held:
            idle = eager or self._lock(held)
            obstacle, failed_stage = "" if idle else _BUSY, None
            compiled: list[list[CompiledStage]] | None = None
            searches = self._searches(call)
            if idle and not eager and not self.in_python:
                try:
                    compiled = self._compile(call)
                except Untraceable as error:
                    obstacle, failed_stage = self._checked_reason(error), error.stage
                    searches = self._without(error, searches)
            if self._has_remote_stages and obstacle:
                raise RuntimeError(f"layers cannot be traced, and with a mesh all have to be: {obstacle}")
            if compiled is None:
                self._check_can_run()
            plan = make_plan(self.stages, searches, call, compiled)
            if plan.compiled is not None:
                number, num_others = self._changing_number(call)
                if num_others > 1:
                    self.module_warnings.add_number(number)
                self.module_warnings.add_unfused(unfused_layers(plan.compiled[0]))
                for own in self.stages:
                    own.arena.release_cached()  # the cached blocks have the sizes of other plans
            return replace(plan, obstacle=obstacle, failed_stage=failed_stage)

    def compile(self, call: Call) -> list[list[CompiledStage]]:
        """Returns the compiled stages of a call without a plan; a plan for the call has the same stages.

        Raises:
            Untraceable: a layer runs in Python instead.
            RuntimeError: another thread is running layers; or as for `plan`.
        """
        with contextlib.ExitStack() as held:
            if not self._lock(held):
                raise RuntimeError(f"layers cannot be traced: {_BUSY}")
            try:
                return self._compile(call)
            except Untraceable as error:
                self._checked_reason(error)
                raise

    def _compile(self, call: Call) -> list[list[CompiledStage]]:
        with intra_op_threads(call.threads), self._progress(call), outside_inference_mode(self.stages):
            return self.compiler.compile(
                self.stages, call.microbatches, self._layout_history, call.inputs.dims.outputs, call.state.key
            )

    def _lock(self, held: contextlib.ExitStack) -> bool:
        """Acquires the locks of all stages until `held` is closed; returns False if layers are running."""
        return all(segments.try_lock(held) for segments in self.segments)

    def layers_in_python(self) -> set[int]:
        """Returns the indices of the layers that run in Python: always, or until they are lowered."""
        return self.in_python.union(*(own.not_yet_lowered() for own in self.segments))

    def unknown_stages(self, failed_stage: int | None, reason: str) -> list[str]:
        """Returns, for each stage, the reason why its bytes are not known, where layers run in Python.

        Args:
            failed_stage: the stage whose trace has failed; None if none has.
            reason: why it has failed.
        """
        number = len(self.stages)
        if self.backend == "eager":
            return ["all layers run in Python: backend='eager'"] * number
        own: dict[int, str] = {} if failed_stage is None else {failed_stage: reason}
        for (stage, _), why in self.module_warnings.python_layers.items():
            own[stage] = f"{own[stage]}; {why}" if stage in own else str(why)
        if not own:
            return [reason] * number
        own = {stage: text.removeprefix(f"stage {stage}, ") for stage, text in own.items()}
        others = f"depends on the tensors of stage {min(own)}"
        return [own.get(stage, others) for stage in range(number)]

    @contextlib.contextmanager
    def _progress(self, call: Call) -> Iterator[None]:
        """Shows the work of a first call, if it takes long, and which other calls will take as long."""
        inputs = progress.title_of(call.inputs.tensors)
        number, _ = self._changing_number(call)
        if number:
            inputs, outlook = f"{inputs} and the number {number}", "; each new number takes as long"
        else:
            outlook = _outlook(
                self.compiler.num_sizes_to_trace(self.stages[0], call.microbatches, call.state.key)
            )
        what = f"the first call with inputs of {inputs} in this mode"
        with progress.first_call([len(stage.layers) for stage in self.stages], what=what, outlook=outlook):
            yield

    def _changing_number(self, call: Call) -> tuple[str, int]:
        """Returns the number among the inputs that differs from earlier calls: as `changing_number` does."""
        return changing_number(call.inputs.structure, [each for each, _ in self._structures.entries()])

    def _check_can_run(self) -> None:
        """Checks that the layers can run in Python."""
        for index, stage in enumerate(self.stages):
            try:
                check_can_run(stage.layers)
            except Untraceable as error:
                error.stage = index
                raise error.error(failure_message(error, self.stages)) from None

    def _searches(self, call: Call) -> list[SegmentSearch]:
        # Programs are lowered for the intra-op thread count of the stages' workers.
        modes = call.state.modes._replace(num_threads=call.threads)
        fractions, in_python = call.saved_fractions, self.backend == "eager"
        return [
            SegmentSearch(segments, modes, StageTensors.of(segments.stage), own, in_python)
            for segments, own in zip(self.segments, fractions, strict=True)
        ]

    def _without(self, failure: Untraceable, searches: list[SegmentSearch]) -> list[SegmentSearch]:
        """Returns searches that run in Python what could not be traced."""
        if isinstance(failure, TooManyTraces):
            report = functools.partial(self.module_warnings.add, 0, None, None, failure.reason)
            return [replace(search, all_in_python=True, on_success=report) for search in searches]
        assert failure.layer is not None
        suspects = {failure.layer: failure.reason}
        return [replace(s, suspects=suspects) if i == failure.stage else s for i, s in enumerate(searches)]

    def _checked_reason(self, failure: Untraceable) -> str:
        """Returns the reason of a failure.

        Raises:
            RuntimeError: no layer may run in Python instead; or an exception of another type.
        """
        text = failure_message(failure, self.stages)
        if self.backend == "aten" or failure.is_fatal:
            if not failure.is_fatal and failure.error is RuntimeError:
                text += (
                    "; with a mesh all layers must be traced, because other processes need the shapes"
                    if self._has_remote_stages
                    else "; without a mesh, pass backend='auto' to GPipe to run the layer in Python"
                )
            raise failure.error(text) from None
        return text


def _boundary(tensors: Sequence[Tensor], originals: Sequence[Tensor], structure: Structure) -> BoundarySpec:
    """Returns the specs of a micro-batch or mini-batch; a detached part needs gradients if its whole does."""
    grad = torch.is_grad_enabled()
    specs = tuple(TensorSpec.of(t, grad and w.requires_grad) for t, w in zip(tensors, originals, strict=True))
    return BoundarySpec(specs, structure)


def _with_given(boundary: BoundarySpec, given: Sequence[Tensor]) -> BoundarySpec:
    return boundary.with_skips([TensorSpec.of(x, False) for x in given]) if given else boundary


def why_in_python(failure: Untraceable, stages: Sequence[Stage]) -> InPython:
    """Returns why the stage or the layer that cannot be compiled runs in Python, where it may."""
    return InPython.of(failure.stage, stages[failure.stage], failure.layer, failure.reason)


def failure_message(failure: Untraceable, stages: Sequence[Stage]) -> str:
    """Returns the stage and the layer that cannot be compiled, and the reason."""
    found = why_in_python(failure, stages)
    return f"{found.where} cannot be traced faithfully: {found.reason}"


def _outlook(left: int | None) -> str:
    """Returns what to expect of calls with other shapes, of which so many will be traced."""
    if left is None:
        return "; each new shape takes as long"
    if left < 0:
        return ""
    if left == 0:
        return "; the next ones are faster, unless another size varies, such as the batch's"
    several = "s, the last one slowest" if left > 1 else ", the slowest one"
    return f"; expect {left} more slow call{several}, if shapes change"


class _AllLocks:
    """Several locks that are acquired together, in order."""

    def __init__(self, locks: Sequence[Lock]) -> None:
        self._locks = locks

    def acquire(self, blocking: bool = True) -> bool:
        for number, lock in enumerate(self._locks):
            if not lock.acquire(blocking=blocking):
                for held in self._locks[:number]:
                    held.release()
                return False
        return True

    def release(self) -> None:
        for lock in self._locks:
            lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


def _locks(stages: Sequence[Stage]) -> list[threading.RLock]:
    """Returns a lock for each stage; the same lock for all stages if any two share a parameter."""
    parameters = [id(p) for stage in stages for p in parameters_of(stage.layers)]
    if len(set(parameters)) == len(parameters):
        return [threading.RLock() for _ in stages]
    return [threading.RLock()] * len(stages)


class PreparedCall(NamedTuple):
    """A call that is ready to run.

    Attributes:
        call: its description.
        plan: the plan.
        pipeline: the C++ pipeline that runs it.
        parameters: the parameters of all layers.
        buffers: the buffers of all layers.
        state: what tells whether a layer in Python changes other layers; None if no layer runs in Python.
        in_python: returns the indices of the layers that have run in Python, once the call has run.
        wait: waits for the calls in flight.
    """

    call: Call
    plan: PlannedCall
    pipeline: Pipeline
    parameters: Sequence[Tensor]
    buffers: Sequence[Tensor]
    state: ModuleState | None
    in_python: Callable[[], Container[int]]
    wait: Callable[[], None] = lambda: None

    def key(self, draw: Callable[[], int] = minibatch_key) -> int | MinibatchKey:
        """Returns the mini-batch's key; if it is known only at run time whether one is needed, draws it then.

        A plan without random operators does not advance PyTorch's generator.
        """
        if self.plan.draws is None:
            return MinibatchKey(draw=draw)
        return draw() if self.plan.draws else 0

    def check_unchanged(self) -> None:
        """Checks that no layer in Python has changed what other layers read.

        Raises:
            RuntimeError: a layer has.
        """
        if not self._is_changed():
            return
        self.wait()  # the others may be about to run in Python, too, for the first time
        if self._is_changed():
            raise RuntimeError(
                "a layer that runs in Python changed what other layers read, during the call; these may "
                "have run without the change; pass backend='eager' to GPipe to run all layers in Python"
            )

    def _is_changed(self) -> bool:
        if self.state is None:
            return False
        with TRACING_LOCK:  # a trace by another thread replaces parameters meanwhile
            return self.state.is_changed(self.in_python())

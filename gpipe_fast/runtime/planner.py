"""The planner: makes a plan on the first call of a signature, and again only after a change."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe_fast import _extension, progress
from gpipe_fast.layers.layer_title import layer_title
from gpipe_fast.layers.structure import BatchDims, Inputs, Structure
from gpipe_fast.lower.checkpoint import Checkpoint, SavedFraction
from gpipe_fast.runtime.cache import Cache
from gpipe_fast.runtime.compile import MAX_TRACES, CompilationFailure, Compiler, TooManyTraces
from gpipe_fast.runtime.compiled import CACHE_LIMIT, CompiledStage, GradientLayoutHistory
from gpipe_fast.runtime.eviction import Eviction
from gpipe_fast.runtime.footprint import limit_bytes
from gpipe_fast.runtime.garbage import collected
from gpipe_fast.runtime.module_warnings import ModuleWarnings
from gpipe_fast.runtime.output_checks import check_boundaries, check_outputs
from gpipe_fast.runtime.plan import CheckOutputs, PlannedCall, check_placed, make_plan
from gpipe_fast.runtime.segments import Segments, SegmentSearch, SegmentSharedState
from gpipe_fast.runtime.stage import BoundarySpec, Stage, TensorSpec, TorchModes, intra_op_threads
from gpipe_fast.runtime.state import ModuleState
from gpipe_fast.trace.joint_graph import parameters_of
from gpipe_fast.trace.layer_states import StateKey
from gpipe_fast.trace.traceability import check_initialized

# The maximum number of signatures whose programs a module caches.
_MAX_SIGNATURES = 32


@dataclass(frozen=True)
class Signature:
    """A cache key: everything that the programs of a mini-batch depend on.

    Attributes:
        inputs: the specs of the module's inputs.
        dims: the dimensions along which inputs are split and outputs are concatenated.
        chunks: the maximum number of micro-batches.
        threads: intra-op threads of each stage.
        modes: PyTorch's modes.
        layers: the state of the layers.
    """

    inputs: BoundarySpec
    dims: BatchDims
    chunks: int
    threads: int
    modes: TorchModes
    layers: StateKey

    @classmethod
    def of(cls, inputs: Inputs, chunks: int, threads: int, state: ModuleState) -> Signature:
        """Returns the signature of a call under the calling thread's modes."""
        boundary = _boundary(inputs.tensors, inputs.tensors, inputs.structure)
        return cls(boundary, inputs.dims, chunks, threads, state.modes, state.key)


@dataclass(frozen=True)
class _Call:
    """A call to make a plan for.

    Attributes:
        signature: the call's signature.
        microbatches: for each micro-batch, the specs of the first stage's inputs.
        saved_fractions: for each micro-batch, the fraction of activations that it saves.
    """

    signature: Signature
    microbatches: Sequence[BoundarySpec]
    saved_fractions: Sequence[SavedFraction]

    @classmethod
    def of(cls, signature: Signature, inputs: Sequence[Tensor], checkpoint: Checkpoint) -> _Call:
        parts = signature.dims.split([x.detach() for x in inputs], signature.chunks)
        microbatches = [_boundary(tensors, inputs, signature.inputs.structure) for tensors in parts]
        return cls(signature, microbatches, checkpoint.saved_fractions(len(microbatches)))

    def output_check(self) -> CheckOutputs:
        """Returns a function that raises unless the micro-batches' outputs can be concatenated."""
        dims = self.signature.dims
        lengths = [_num_samples(dims, boundary) for boundary in self.microbatches]
        return functools.partial(check_boundaries, dim=dims.outputs, lengths=lengths)


class Compiled(NamedTuple):
    """The compiled stages of a call, by micro-batch, or the failure; and what each micro-batch saves."""

    stages: list[list[CompiledStage]] | CompilationFailure
    saved_fractions: Sequence[SavedFraction]


# A plan's cache key: the call, and the latest gradient layouts at the compiled stages, if known.
_Key = tuple[Signature, Checkpoint, tuple[Hashable, ...]]


class Planner:
    """The cache of plans for the calls of one module.

    Attributes:
        module_warnings: warnings about layers that run in Python, and about avoidable costs.
        latest: the plan of the latest call; None before the first.
        stages: the stages.
        backend: as for `GPipe`.
        eviction: the limit on the bytes that the cache keeps.
    """

    def __init__(
        self, stages: Sequence[Stage], backend: str, python_workers: _extension.PythonWorkers
    ) -> None:
        self.module_warnings = ModuleWarnings()
        self.latest: PlannedCall | None = None
        self.stages = stages
        self.backend = backend
        self._compiler = Compiler(max_traces=None if backend == "aten" else MAX_TRACES)
        self._layout_history = GradientLayoutHistory(CACHE_LIMIT * len(stages))
        self._lowering_pending = threading.Event()
        locks = _locks(stages)
        shared = SegmentSharedState(
            self._compiler,
            self._layout_history,
            python_workers,
            self._lowering_pending,
            list(dict.fromkeys(locks)),
        )
        self._segments = [
            Segments(stage, f"stage {i}", shared, functools.partial(self.module_warnings.add, i, stage), lock)
            for i, (stage, lock) in enumerate(zip(stages, locks, strict=True))
        ]
        # By signature, the compiled stages of the first micro-batch, and of the last if its shape differs.
        self._compiled: Cache[Signature, list[list[CompiledStage]]] = Cache(_MAX_SIGNATURES)
        self._plans: Cache[_Key, PlannedCall] = Cache(_MAX_SIGNATURES)
        self.eviction = Eviction(
            limit_bytes(p for stage in stages for p in parameters_of(stage.layers)),
            self._plans,
            self._compiled,
            self._compiler,
            self._segments,
        )
        # The latest call and its plan, because comparing one key is cheaper than hashing it.
        self._latest_call: tuple[Signature, Checkpoint, int, PlannedCall] | None = None

    def plan(self, signature: Signature, inputs: Sequence[Tensor], checkpoint: Checkpoint) -> PlannedCall:
        """Returns the plan for a call, from the cache or newly made.

        Args:
            signature: the call's signature.
            inputs: the module's inputs; only their metadata is read.
            checkpoint: the fraction of activations that micro-batches save.

        Raises:
            TypeError: the last layer returns no tensor; or, under ``backend='aten'``, a stage returns a value
                that cannot be passed to the next stage.
            RuntimeError: under ``backend='aten'``, a stage cannot be traced; the message names the layer and
                the reason.
        """
        if self._lowering_pending.is_set():
            self._lowering_pending.clear()
            with collected():
                for segments in self._segments:
                    segments.lower_requested()
                self.eviction.run(signature)
        num_changes = self._layout_history.num_changes
        if self._latest_call is not None and self._latest_call[:3] == (signature, checkpoint, num_changes):
            self.latest = self._latest_call[3]
            return self.latest
        plan = self._plans.find(self._key(signature, checkpoint))
        if plan is None:
            plan, is_cacheable = self._make(signature, inputs, checkpoint)
            self.latest = plan
            if not is_cacheable:
                return plan
            self._plans[self._key(signature, checkpoint)] = plan
            self.eviction.run(signature)
        self.latest = plan
        self._latest_call = (signature, checkpoint, num_changes, plan)
        return plan

    def move_signature(self, before: Signature, now: Signature) -> None:
        """Moves cache entries to a call's new signature, after captures have added guards."""
        compiled = self._compiled.pop(before, None)
        if compiled is not None:
            self._compiled[now] = compiled
            self.eviction.move(before, now)
        for key in [key for key in self._plans if key[0] == before]:
            self._plans[(now, *key[1:])] = self._plans.pop(key)
        self._latest_call = None

    def _key(self, signature: Signature, checkpoint: Checkpoint) -> _Key:
        """Returns the cache key of a plan; it includes gradient layouts if the stages are compiled."""
        layouts = [
            None if (found := self._layout_history.get(stage.segment_key)) is None else tuple(found.items())
            for compiled in self._compiled.get(signature, ())
            for stage in compiled
        ]
        return (signature, checkpoint, tuple(layouts))

    def _make(
        self, signature: Signature, inputs: Sequence[Tensor], checkpoint: Checkpoint
    ) -> tuple[PlannedCall, bool]:
        """Makes a plan, and returns whether to cache it.

        A plan is valid for one call only if another thread is running layers, because no layer is traced
        then, or if a trace failed: the reason may be the call's inputs, for which the layer then raises.
        """
        check_placed(self.stages)
        call = _Call.of(signature, inputs, checkpoint)
        if self.backend == "eager":
            return self._make_dynamic_plan(call, all_in_python=True), True
        with contextlib.ExitStack() as held:
            idle = all(segments.try_lock(held) for segments in self._segments)
            if self.module_warnings.in_python or not idle:
                busy = (
                    "" if idle else "another thread runs layers of the model; wait until its call has ended"
                )
                return replace(self._make_dynamic_plan(call), obstacle=busy), idle
            # Only here are graphs made: a plan for one call, while other threads run layers, stays cheap.
            with collected(), intra_op_threads(signature.threads), self._progress():
                known = self._compile(call)
                if isinstance(known, CompilationFailure):
                    reason = _failure_message(known, self.stages)
                    return replace(self._make_dynamic_plan(call, failure=known), obstacle=reason), False
                plan = self._make_plan(call, self._searches(call), known)
                stages = [stage for pipeline in known for stage in pipeline]
                for stage in stages:
                    stage.traced.drop_graph()
                self.eviction.record(signature, stages)
                for own in self.stages:
                    own.arena.release_cached()  # the cached blocks have the sizes of other plans
                return plan, True

    def compile(self, signature: Signature, inputs: Sequence[Tensor], checkpoint: Checkpoint) -> Compiled:
        """Returns the compiled stages of a call without a plan; a plan for the call has the same stages.

        Args:
            signature: the call's signature.
            inputs: the module's inputs; only their metadata is read.
            checkpoint: the fraction of activations that micro-batches save.

        Raises:
            RuntimeError: another thread is running layers; or as for `plan`.
        """
        call = _Call.of(signature, inputs, checkpoint)
        with contextlib.ExitStack() as held:
            if not all(segments.try_lock(held) for segments in self._segments):
                raise RuntimeError(
                    "layers cannot be traced while another thread runs layers of the model; wait until its "
                    "call has ended"
                )
            with intra_op_threads(signature.threads), self._progress():
                return Compiled(self._compile(call), call.saved_fractions)

    def lowered(self) -> list[CompiledStage]:
        """Returns the stages, and parts of stages, that are lowered for some call, by their first layer."""
        return self._compiler.lowered()

    def _progress(self) -> contextlib.AbstractContextManager[None]:
        """Shows the work of a first call, if it takes long."""
        return progress.first_call([len(stage.layers) for stage in self.stages])

    def _compile(self, call: _Call) -> list[list[CompiledStage]] | CompilationFailure:
        """Returns the compiled stages of each micro-batch, for the latest gradient layouts.

        Raises:
            RuntimeError: a stage cannot be compiled, and its layers may not run in Python instead.
        """
        compiled = self._compiled.find(call.signature)
        found: list[list[CompiledStage]] | CompilationFailure
        if compiled is None:
            distinct = list(dict.fromkeys((call.microbatches[0], call.microbatches[-1])))
            found = self._compiler.compile(self.stages, distinct)
            if isinstance(found, CompilationFailure):
                return self._return_or_raise(found)
            check_outputs(
                [(p[-1].outputs.structure, [s.shape for s in p[-1].outputs.tensors]) for p in found],
                call.signature.dims.outputs,
                [_num_samples(call.signature.dims, boundary) for boundary in distinct],
            )
            compiled = self._compiled[call.signature] = found
            self.module_warnings.add_unfused(_unfused_layers(found[0]))
        dim, number = call.signature.dims.outputs, len(call.microbatches)
        found = self._compiler.compile_for_gradients(compiled, self._layout_history, dim, number)
        if isinstance(found, CompilationFailure):
            return self._return_or_raise(found)
        return [found[0]] * (len(call.microbatches) - 1) + [found[-1]]

    def _make_plan(
        self, call: _Call, searches: Sequence[SegmentSearch], known: Sequence[Sequence[CompiledStage]] | None
    ) -> PlannedCall:
        return make_plan(
            self.stages,
            searches,
            call.microbatches[0],
            call.saved_fractions,
            call.signature.threads,
            call.signature.dims,
            known,
            None if known is not None else call.output_check(),
        )

    def _make_dynamic_plan(
        self, call: _Call, all_in_python: bool = False, failure: CompilationFailure | None = None
    ) -> PlannedCall:
        """Makes a plan whose chains are found at run time, because boundary tensors are unknown before."""
        for index, stage in enumerate(self.stages):
            untraceable = check_initialized(stage.layers)
            if untraceable is not None:
                raise RuntimeError(_failure_message(CompilationFailure(index, untraceable), self.stages))
        searches = self._searches(call, all_in_python=all_in_python)
        if failure is not None:
            reason, index = failure.untraceable, failure.stage_index
            if isinstance(reason, TooManyTraces):
                report = functools.partial(self.module_warnings.add, 0, None, None, reason.reason)
                searches = [replace(search, all_in_python=True, on_success=report) for search in searches]
            else:
                assert reason.layer is not None
                searches[index] = replace(searches[index], suspects={reason.layer: reason.reason})
        return self._make_plan(call, searches, None)

    def _searches(self, call: _Call, all_in_python: bool = False) -> list[SegmentSearch]:
        # Programs are lowered for the intra-op thread count of the stages' workers.
        modes = call.signature.modes._replace(num_threads=call.signature.threads)
        return [
            SegmentSearch(segments, modes, call.saved_fractions, all_in_python) for segments in self._segments
        ]

    def _return_or_raise(self, failure: CompilationFailure) -> CompilationFailure:
        """Returns the failure, or raises it if no layer may run in Python instead."""
        reason = failure.untraceable
        if self.backend == "aten" or reason.is_fatal:
            text = _failure_message(failure, self.stages)
            if not reason.is_fatal and reason.error is RuntimeError:
                text += "; pass backend='auto' to GPipe to run the layer in Python"
            raise reason.error(text)
        return failure


def _boundary(tensors: Sequence[Tensor], originals: Sequence[Tensor], structure: Structure) -> BoundarySpec:
    """Returns the specs of a micro-batch or mini-batch; a detached part needs gradients if its whole does."""
    grad = torch.is_grad_enabled()
    specs = tuple(TensorSpec.of(t, grad and w.requires_grad) for t, w in zip(tensors, originals, strict=True))
    return BoundarySpec(specs, structure)


def _unfused_layers(compiled: Sequence[CompiledStage]) -> list[str]:
    """Returns the names of layers whose attention with dropout runs without a fused kernel on a GPU."""
    return [
        f"stage {index}, {layer_title(each.stage.first_layer + layer, each.stage.layers[layer])}"
        for index, each in enumerate(compiled)
        for layer in each.traced.ports.unfused_layers
    ]


def _num_samples(dims: BatchDims, microbatch: BoundarySpec) -> int:
    """Returns the number of samples of a micro-batch."""
    specs = zip(microbatch.tensors, dims.inputs, strict=True)
    return next(spec.shape[dim] for spec, dim in specs if dim is not None)


def _failure_message(failure: CompilationFailure, stages: Sequence[Stage]) -> str:
    stage, untraceable = stages[failure.stage_index], failure.untraceable
    where = f"stage {failure.stage_index}"
    if untraceable.layer is not None:
        where += f", {layer_title(stage.first_layer + untraceable.layer, stage.layers[untraceable.layer])}"
    return f"{where} cannot be traced faithfully: {untraceable.reason}"


def _locks(stages: Sequence[Stage]) -> list[threading.RLock]:
    """Returns a lock for each stage; the same lock for all stages if any two share a parameter."""
    parameters = [id(p) for stage in stages for p in parameters_of(stage.layers)]
    if len(set(parameters)) == len(parameters):
        return [threading.RLock() for _ in stages]
    return [threading.RLock()] * len(stages)

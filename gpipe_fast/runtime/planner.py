"""From a call to its plan: made when such a call is first seen, and again only after a change."""

from __future__ import annotations

import contextlib
import functools
import reprlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpipe_fast import _extension
from gpipe_fast.layers.structure import Dims, Inputs, Structure
from gpipe_fast.layers.title import title
from gpipe_fast.lower.split import FULL_RECOMPUTE
from gpipe_fast.runtime.compile import TRACES, CompiledStage, Compiler, Refusal, TooManyTraces
from gpipe_fast.runtime.late import LateStage, Remarks, Search
from gpipe_fast.runtime.plan import Plan, check_placed, make_late_plan, make_plan
from gpipe_fast.runtime.stage import TURN, Boundary, Modes, Spec, Stage, intra_op_threads, under
from gpipe_fast.runtime.state import State
from gpipe_fast.trace.refuse import refuse_uninitialised
from gpipe_fast.trace.trace import parameters_of
from gpipe_fast.uncompiled import uncompiled

# Signatures whose programs a module remembers.
_SIGNATURES = 32

Mask = tuple[bool, ...]  # by output


@dataclass(frozen=True)
class Signature:
    """All that the programs of a mini-batch depend on.

    Attributes:
        inputs: what the module is called with.
        dims: along which it is cut, and outputs are joined.
        chunks: into how many micro-batches it is cut, at most.
        threads: intra-op threads of each stage.
        modes: PyTorch's global modes.
        layers: the layers' fingerprint.
    """

    inputs: Boundary
    dims: Dims
    chunks: int
    threads: int
    modes: Modes
    layers: Hashable

    @classmethod
    def of(cls, inputs: Inputs, chunks: int, threads: int, state: State) -> Signature:
        """The signature of a call under the present modes."""
        boundary = _boundary(inputs.tensors, inputs.tensors, inputs.structure)
        return cls(boundary, inputs.dims, chunks, threads, Modes.now(), state.fingerprint)


class Planner:
    """Plans for the calls of one module.

    Attributes:
        remarks: what runs in Python, and why.
        latest: the plan of the latest call; None before the first.
    """

    def __init__(self, stages: Sequence[Stage], backend: str, interpreted: _extension.Interpreted) -> None:
        self.remarks = Remarks()
        self._backend = backend
        self._programs = _Programs(stages, None if backend == "aten" else TRACES)
        self._found = threading.Event()
        locks = _locks(stages)
        self._late = [
            LateStage(
                stage,
                f"stage {i}",
                self._programs.compiler,
                interpreted,
                self._found,
                functools.partial(self.remarks.add, i, stage),
                lock,
                list(dict.fromkeys(locks)),
            )
            for i, (stage, lock) in enumerate(zip(stages, locks, strict=True))
        ]
        self._plans: OrderedDict[Any, Plan] = OrderedDict()
        self._expected = _Expected()
        # The latest call and its plan: comparing is cheaper than hashing.
        self._latest: tuple[Signature, tuple[float, float], int, Plan] | None = None
        self.latest: Plan | None = None

    def plan(self, signature: Signature, inputs: Sequence[Tensor], budgets: tuple[float, float]) -> Plan:
        """The plan for such a call.

        Args:
            signature: of the call.
            inputs: what the module is called with; only described.
            budgets: the share of activations saved, of all micro-batches but the last and of the last.

        Raises:
            TypeError: the last layer returns no tensor, or a stage, under ``backend='aten'``, something that
                cannot be passed on.
            RuntimeError: a stage cannot be traced, under ``backend='aten'``; the message names the layer and
                the reason.
        """
        if self._found.is_set():
            self._found.clear()
            for late in self._late:
                late.lower_wanted()
        if self._latest is not None and self._latest[:3] == (signature, budgets, self._expected.changes):
            self.latest = self._latest[3]
            return self.latest
        key = (signature, budgets, self._expected.get(signature))
        found = self._plans.get(key)
        if found is None:
            with contextlib.ExitStack() as held:
                idle = all(late.hold(held) for late in self._late)
                found, lasts = self._make(signature, inputs, budgets, idle)
            if not lasts:
                self.latest = found
                return found
            _remember(self._plans, key, found)
        self._plans.move_to_end(key)
        self.latest = found
        self._latest = (signature, budgets, self._expected.changes, found)
        return found

    def rename(self, before: Signature, now: Signature) -> None:
        """Lets a call's plan be that of the same call, of whose layers more is known by now."""
        caches: list[OrderedDict[Any, Any]] = [self._plans, self._programs._compiled]
        for cache in caches:
            for key in [key for key in cache if key[0] == before]:
                cache[(now, *key[1:])] = cache.pop(key)
        if before in self._expected:
            self._expected[now] = self._expected.pop(before)
        self._latest = None

    def _make(
        self, signature: Signature, inputs: Sequence[Tensor], budgets: tuple[float, float], idle: bool
    ) -> tuple[Plan, bool]:
        """Makes a plan; it is for this time only where it is not known yet what has to run in Python.

        It is not while another thread runs layers, since none is traced then; nor where one could not be
        traced: that may be the fault of this call, whose error the layer then raises in Python.
        """
        check_placed(self._programs.stages)
        microbatches = [
            _boundary(tensors, inputs, signature.inputs.structure)
            for tensors in signature.dims.cut([x.detach() for x in inputs], signature.chunks)
        ]
        late = functools.partial(self._make_late, signature, microbatches, budgets)
        if self._backend == "eager":
            return late(eager=True), True
        if self.remarks.in_python or not idle:
            return late(eager=False), idle
        with intra_op_threads(signature.threads):
            pipelines = self._programs.compile(signature, microbatches)
            if isinstance(pipelines, Refusal):
                self._refuse(pipelines)
                return late(eager=isinstance(pipelines.untraceable, TooManyTraces), refusal=pipelines), False
            differentiable = tuple(spec.requires_grad for spec in pipelines[0][-1].outputs.tensors)
            expected = self._expected.get(signature, differentiable)
            if expected != differentiable:
                pipelines = self._programs.compile(signature, microbatches, expected)
                if isinstance(pipelines, Refusal):
                    raise RuntimeError(_explain(pipelines, self._programs.stages))
            plan = make_plan(
                pipelines,
                [budgets[0]] * (len(microbatches) - 1) + [budgets[1]],
                signature.threads,
                signature.dims,
                expected,
                # One output either gets its gradient, or there is no backward.
                _Instead(self._programs, self._expected, signature, microbatches)
                if sum(differentiable) > 1
                else None,
            )
            return plan, True

    def _make_late(
        self,
        signature: Signature,
        microbatches: Sequence[Boundary],
        budgets: tuple[float, float],
        *,
        eager: bool,
        refusal: Refusal | None = None,
    ) -> Plan:
        for index, stage in enumerate(self._programs.stages):
            untraceable = refuse_uninitialised(stage.layers)
            if untraceable is not None:
                raise RuntimeError(_explain(Refusal(index, untraceable), self._programs.stages))
        each = [budgets[0]] * (len(microbatches) - 1) + [budgets[1]]
        # Programs are lowered by workers, which have the stages' thread count.
        modes = signature.modes._replace(num_threads=signature.threads)
        return make_late_plan(
            self._programs.stages,
            [
                Search(late, modes, each, eager, *self._suspected(refusal, i))
                for i, late in enumerate(self._late)
            ],
            microbatches[0],
            each,
            signature.threads,
            signature.dims,
            functools.partial(
                _check_arrived,
                dim=signature.dims.outputs,
                lengths=[_length(signature.dims, boundary) for boundary in microbatches],
            ),
        )

    def _refuse(self, refusal: Refusal) -> None:
        """Raises where no layer may run in Python instead."""
        reason = refusal.untraceable
        if self._backend == "aten" or reason.final:
            raise reason.error(_explain(refusal, self._programs.stages))

    def _suspected(
        self, refusal: Refusal | None, index: int
    ) -> tuple[Mapping[int, str], Callable[[], object] | None]:
        """What a stage tries in Python, and what is called once it has run there: for a `Search`."""
        if refusal is None:
            return {}, None
        reason = refusal.untraceable
        if isinstance(reason, TooManyTraces):
            return {}, functools.partial(self.remarks.add, 0, None, None, reason.reason)
        assert reason.layer is not None
        return {reason.layer: reason.reason} if index == refusal.stage_index else {}, None


class _Expected(dict[Signature, Mask]):
    """To which outputs gradients came last, and how often that changed."""

    changes = 0

    def note(self, signature: Signature, mask: Mask) -> None:
        self[signature] = mask
        self.changes += 1


class _Programs:
    """Compiled stages, by signature."""

    def __init__(self, stages: Sequence[Stage], most_traces: int | None) -> None:
        self.stages = stages
        self.compiler = Compiler(most=most_traces)
        self._compiled: OrderedDict[Any, list[list[CompiledStage]]] = OrderedDict()

    def compile(
        self, signature: Signature, microbatches: Sequence[Boundary], defined: Mask | None = None
    ) -> list[list[CompiledStage]] | Refusal:
        """The compiled stages of each micro-batch, given to which outputs gradients come."""
        key = (signature, defined)
        compiled = self._compiled.get(key)
        if compiled is None:
            # Only the last micro-batch can differ from the others.
            distinct = list(dict.fromkeys((microbatches[0], microbatches[-1])))
            indices = None if defined is None else [i for i, d in enumerate(defined) if d]
            found = self.compiler.compile(
                self.stages, distinct, indices, signature.dims.outputs, len(microbatches)
            )
            if isinstance(found, Refusal):
                return found
            _check_outputs(
                [(p[-1].outputs.structure, [s.shape for s in p[-1].outputs.tensors]) for p in found],
                signature.dims.outputs,
                [_length(signature.dims, boundary) for boundary in distinct],
            )
            compiled = found
            _remember(self._compiled, key, compiled)
        return [compiled[0]] * (len(microbatches) - 1) + [compiled[-1]]


class _Instead:
    """Makes plans for backwards to which the gradients of fewer outputs come than their forward expected.

    They recompute everything, since what the forward saved is for the gradients that it expected. The next
    forward expects what came. Refers to no plan: plans refer to it, from where no cycle would be found.
    """

    def __init__(
        self,
        programs: _Programs,
        expected: _Expected,
        signature: Signature,
        microbatches: Sequence[Boundary],
    ) -> None:
        self._programs = programs
        self._expected = expected
        self._signature = signature
        self._microbatches = microbatches
        self._plans: dict[Mask, _extension.Plan] = {}

    # A backward within a compiled function calls it, and Dynamo would trace what makes plans.
    @uncompiled
    def __call__(self, defined: Sequence[bool]) -> _extension.Plan:
        mask = tuple(defined)
        with TURN:
            self._expected.note(self._signature, mask)
            if mask not in self._plans:
                self._plans[mask] = self._make(mask)
            return self._plans[mask]

    def _make(self, mask: Mask) -> _extension.Plan:
        self._check_unchanged()
        signature = self._signature
        with torch.enable_grad(), under(signature.modes.autocast), intra_op_threads(signature.threads):
            pipelines = self._programs.compile(signature, self._microbatches, mask)
            if isinstance(pipelines, Refusal):
                raise RuntimeError(_explain(pipelines, self._programs.stages))
            budgets = [FULL_RECOMPUTE] * len(self._microbatches)
            plan = make_plan(pipelines, budgets, signature.threads, signature.dims, mask)
        return plan.native

    def _check_unchanged(self) -> None:
        state = State()
        state.look([layer for stage in self._programs.stages for layer in stage.layers])
        if state.fingerprint != self._signature.layers:
            raise RuntimeError(
                "the module was changed between forward and backward, and gradients came to other outputs "
                "than before; call the module again"
            )


def _boundary(tensors: Sequence[Tensor], wholes: Sequence[Tensor], structure: Structure) -> Boundary:
    """Describes one micro-batch, or all; detached parts need gradients if what they are cut from does."""
    grad = torch.is_grad_enabled()
    specs = tuple(Spec.of(t, grad and w.requires_grad) for t, w in zip(tensors, wholes, strict=True))
    return Boundary(specs, structure)


def _length(dims: Dims, microbatch: Boundary) -> int:
    """How many samples a micro-batch has."""
    cuts = zip(microbatch.tensors, dims.inputs, strict=True)
    return next(spec.shape[dim] for spec, dim in cuts if dim is not None)


def _check_arrived(microbatches: Sequence[_extension.Boundary], dim: int, lengths: Sequence[int]) -> None:
    _check_outputs([(m.form.structure, [t.shape for t in m.tensors]) for m in microbatches], dim, lengths)


def _check_outputs(
    microbatches: Sequence[tuple[Structure, Sequence[Sequence[int]]]], dim: int, lengths: Sequence[int]
) -> None:
    """Refuses structures and shapes that cannot be joined along a dimension, given the samples of each."""
    structure, shapes = microbatches[0]
    for other, _ in microbatches:
        if other != structure:
            raise RuntimeError(
                "the last layer returns what differs between micro-batches beside its tensors: "
                f"{structure} and {other}"
            )
    if not shapes:
        value = structure.build([])
        raise TypeError(
            f"expected Tensor, but the last layer returned {reprlib.repr(value)} of type "
            f"{type(value).__name__}, in which there is none to concatenate; return a tensor for each "
            "micro-batch, or several in tuples, lists and dicts, beside None, bools, numbers and strings"
        )
    for index, shape in enumerate(shapes):
        if not len(shape):
            raise RuntimeError(
                f"output {index} of the last layer is 0-dimensional, so those of the micro-batches cannot be "
                f"concatenated; return a tensor whose {'first ' if dim == 0 else ''}dimension "
                f"{'' if dim == 0 else f'{dim} '}is the batch"
            )
    if dim != 0:  # along the first one lengths may differ from the inputs', as they may in a loop
        for (_, each), length in zip(microbatches, lengths, strict=True):
            for index, shape in enumerate(each):
                _check_batched(index, shape, dim, length)


def _check_batched(index: int, shape: Sequence[int], dim: int, length: int) -> None:
    if not -len(shape) <= dim < len(shape) or shape[dim] != length:
        raise RuntimeError(
            f"output {index} of the last layer has shape {list(shape)} for a micro-batch of {length}, so its "
            f"batch is not in dimension {dim}, along which outputs are joined as batch_dim says; return a "
            "tensor whose batch is there"
        )


def _explain(refusal: Refusal, stages: Sequence[Stage]) -> str:
    stage, untraceable = stages[refusal.stage_index], refusal.untraceable
    where = f"stage {refusal.stage_index}"
    if untraceable.layer is not None:
        where += f", {title(stage.first_layer + untraceable.layer, stage.layers[untraceable.layer])}"
    return f"{where} cannot be traced faithfully: {untraceable.reason}"


def _locks(stages: Sequence[Stage]) -> list[threading.RLock]:
    """One each, or the same for all where stages share parameters."""
    parameters = [id(p) for stage in stages for p in parameters_of(stage.layers)]
    if len(set(parameters)) == len(parameters):
        return [threading.RLock() for _ in stages]
    return [threading.RLock()] * len(stages)


_Cached = TypeVar("_Cached")


def _remember(cache: OrderedDict[Hashable, _Cached], key: Hashable, value: _Cached) -> None:
    cache[key] = value
    while len(cache) > _SIGNATURES:
        cache.popitem(last=False)

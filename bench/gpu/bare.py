"""The calls of a model's lowered programs, and the bare time of its products and attention.

A bare sum adds, for every distinct call of a library's product or attention in a step, the time of this call
alone, launched again and again without gaps, times the number of such calls in the step. A step takes longer
by everything else that it does, by what the host does not hide, and by clocks that are lower in a step.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from gpipe_fast._extension import ActiveRuns
from gpipe_fast.lower.checkpoint import CheckpointSetting, checkpoint_policy
from gpipe_fast.lower.operator_examples import CANNOT_RUN, Spec, as_in_a_program
from gpipe_fast.lower.program import ProgramIR
from gpipe_fast.lower.steps import Call, Ref
from gpipe_fast.lower.work import is_product_or_attention
from gpipe_fast.runtime.planner import Planner
from gpipe_fast.strides import span

# Programs, and how often each runs in a mini-batch.
Programs = Sequence[tuple[ProgramIR, int]]
# Calls between two events, and repetitions, of which the median counts.
CALLS, REPETITIONS = 20, 3
# GPU cycles (about a millisecond) in which the CPU enqueues the calls, so that they run without gaps.
ENQUEUE_CYCLES = 2_000_000


@dataclass(frozen=True)
class Operand:
    """A tensor among the arguments of a call; equal positions are the same tensor, as of an accumulator."""

    position: int
    spec: Spec


@dataclass(frozen=True)
class BareCall:
    """A call of an operator, without the values of its tensors.

    Attributes:
        op: the operator.
        arguments: its arguments in the order of its schema, with an `Operand` for each tensor.
        results: the specs of its results; None for one that no step uses.
    """

    op: Any
    arguments: tuple[Any, ...]
    results: tuple[Spec | None, ...]

    @property
    def name(self) -> str:
        """The operator's name without its namespace."""
        name: str = self.op._schema.name
        return name.partition("::")[2]

    def operands(self) -> list[Operand]:
        """Returns the tensors among the arguments, each once."""
        return list(dict.fromkeys(_operands_in(self.arguments)))

    def shapes(self) -> str:
        """Returns the dtype and the shapes of the tensors; T marks one that is transposed."""
        specs = [operand.spec for operand in self.operands() if operand.spec.shape]
        shown = ["x".join(map(str, spec.shape)) + "T" * (spec.strides[-1] != 1) for spec in specs]
        dtype = str(self.operands()[0].spec.dtype).removeprefix("torch.")
        return f"{dtype} {', '.join(shown[:4])}{', ...' if len(shown) > 4 else ''}"

    def examples(self, device: torch.device | str) -> tuple[list[Any], dict[str, Any]]:
        """Returns arguments; floating-point tensors are random, because power depends on their bits."""
        tensors = {each.position: _random(each.spec, device) for each in self.operands()}
        args, kwargs = list[Any](), dict[str, Any]()
        for argument, schema in zip(self.arguments, self.op._schema.arguments, strict=True):
            value = _filled(argument, tensors, device)
            if schema.kwarg_only:
                kwargs[schema.name] = value
            else:
                args.append(value)
        return args, kwargs

    def operations(self) -> int:
        """Returns the floating-point operations; causal attention counts half of its square; 0 if unknown."""
        counted = flop_registry.get(self.op.overloadpacket)
        if counted is None:
            return 0
        args, kwargs = self.examples("meta")
        outputs = [None if spec is None else spec.example("meta") for spec in self.results]
        found = int(counted(*args, **kwargs, out_val=outputs[0] if len(outputs) == 1 else outputs))
        schema = zip(self.arguments, self.op._schema.arguments, strict=True)
        return found // 2 if any(s.name == "is_causal" and argument for argument, s in schema) else found

    def microseconds(self, device: str) -> float:
        """Returns the bare time of the call."""
        args, kwargs = self.examples(device)
        with as_in_a_program():
            return microseconds(lambda: self.op(*args, **kwargs), device)


def _random(spec: Spec, device: torch.device | str) -> Tensor:
    if not spec.dtype.is_floating_point:
        return spec.example(device)
    memory = torch.randn(span(spec.shape, spec.strides), dtype=spec.dtype, device=device)
    return memory.as_strided(spec.shape, spec.strides)


def _operands_in(argument: Any) -> Iterator[Operand]:
    if isinstance(argument, Operand):
        yield argument
    elif isinstance(argument, tuple):
        for each in argument:
            yield from _operands_in(each)


def _filled(argument: Any, tensors: Mapping[int, Tensor], device: torch.device | str) -> Any:
    if isinstance(argument, Operand):
        return tensors[argument.position]
    if isinstance(argument, tuple):
        return [_filled(each, tensors, device) for each in argument]
    return torch.device(device) if isinstance(argument, torch.device) else argument


def bare_call(program: ProgramIR, call: Call) -> BareCall:
    """Returns a call of a program without the values of its tensors."""
    values, seen = program.values, dict[int, int]()

    def spec(index: int) -> Spec:
        return Spec(values[index].sizes, values[index].strides, values[index].dtype)

    def frozen(argument: Any) -> Any:
        if isinstance(argument, Ref):
            return Operand(seen.setdefault(argument.value, len(seen)), spec(argument.value))
        return tuple(map(frozen, argument)) if isinstance(argument, (list, tuple)) else argument

    arguments = tuple(map(frozen, call.arguments))
    if call.results is not None:
        results = tuple(None if r is None else spec(r) for r in call.results)
    else:
        pairs = zip(arguments, call.op._schema.arguments, strict=True)
        results = tuple(argument.spec for argument, schema in pairs if schema.is_out)
    return BareCall(call.op, arguments, results)


def microseconds(run: Callable[[], object], device: str) -> float:
    """Returns the time of one of several runs that are enqueued before the first of them begins."""
    on_gpu, found = torch.device(device).type == "cuda", []
    run()
    for _ in range(REPETITIONS):
        if on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(ENQUEUE_CYCLES)
            begin.record()
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        taken = (time.perf_counter() - start) * 1e6
        if on_gpu:
            end.record()
            end.synchronize()
            taken = begin.elapsed_time(end) * 1e3
        found.append(taken / CALLS)
    return statistics.median(found)


def programs_of(planner: Planner, checkpoint: CheckpointSetting, chunks: int) -> Programs:
    """Returns the programs of a training step, and how often each runs in it.

    Args:
        planner: the planner of a model whose stages are lowered for one shape of micro-batches.
        checkpoint: the checkpoint setting; all micro-batches save the same.
        chunks: the number of micro-batches.
    """
    found = []
    policy = checkpoint_policy(checkpoint, len(planner.stages), True)
    # The latest of those of the same layers, which differ in the layouts of gradients.
    parts = {(each.stage.first_layer, len(each.stage.layers)): each for each in planner.compiler.lowered()}
    for part in parts.values():
        first = part.stage.first_layer
        index = max(i for i, stage in enumerate(planner.stages) if stage.first_layer <= first)
        for fraction, runs in Counter(policy.saved_fractions(index, chunks)).items():
            lowered = part.traced.lower(fraction)
            found += [(each, runs) for each in (lowered.forward, lowered.backward) if each is not None]
    return found


def runs_of(when: ActiveRuns, runs: int) -> int:
    """Returns how often a step of a program runs in a mini-batch in which the program runs so often."""
    return {ActiveRuns.ALWAYS: runs, ActiveRuns.FIRST: 1, ActiveRuns.LATER: runs - 1}[when]


def bare_calls(programs: Programs) -> dict[BareCall, int]:
    """Returns the distinct products and calls of attention of a step, and the number of each."""
    found: Counter[Any] = Counter()
    calls: dict[str, BareCall] = {}
    for program, runs in programs:
        for step in program.steps:
            if isinstance(step, Call) and is_product_or_attention(step.op._schema.name.partition("::")[2]):
                call = bare_call(program, step)
                key = f"{call.op} {call.arguments}"  # a text, because 1, 1.0 and True are equal
                found[key] += runs_of(step.when, runs)
                calls.setdefault(key, call)
    return {calls[key]: number for key, number in found.items()}


def bare_rows(
    calls: Mapping[BareCall, int], microseconds_of: Callable[[BareCall], float]
) -> tuple[list[list[object]], float]:
    """Returns a row for each distinct call, the longest in sum first, and the bare sum in milliseconds."""
    found, total = list[tuple[float, list[object]]](), 0.0
    for call, number in calls.items():
        try:
            taken = microseconds_of(call)
        except CANNOT_RUN as error:
            found.append((0.0, [call.name, call.shapes(), number, f"FAILED: {error}"[:120], "-", "-"]))
            continue
        in_step, operations = taken * number / 1e3, call.operations()
        rate = f"{operations / taken / 1e6:.3g}" if operations else "-"
        total += in_step
        cells = [call.name, call.shapes(), number, f"{taken:.1f}", f"{in_step:.2f}", rate]
        found.append((in_step, cells))
    return [row for _, row in sorted(found, key=lambda each: -each[0])], total

"""Lowered programs as text, for tests that compare them with what is expected."""

from __future__ import annotations

from typing import Any

from gpipe_fast._extension import ActiveRuns
from gpipe_fast.lower.program import ProgramIR, StorageKind
from gpipe_fast.lower.steps import (
    Accumulate,
    AccumulateAll,
    AdoptAsAccumulator,
    Allocate,
    Call,
    Check,
    Launch,
    Ref,
    Release,
    Step,
    is_written,
)


def describe(program: ProgramIR) -> str:
    """Returns a program as text: one line per step, with shapes, arena offsets and layers."""
    return _Described(program).text()


class _Described:
    def __init__(self, program: ProgramIR) -> None:
        self.program = program
        self.values = program.values

    def text(self) -> str:
        calls = [s for s in self.program.steps if isinstance(s, (Call, Launch))]
        views = sum(v.storage is StorageKind.VIEW for v in self.values)
        lines = [
            f"{self.program.name}: {len(calls)} calls, {views} views, arena {self.program.arena_bytes} bytes",
            *(
                f"  {p} = {self._describe_value(self._value_of_input(i))}"
                for i, p in enumerate(self.program.inputs)
            ),
        ]
        for index, step in enumerate(self.program.steps):
            lines.append(f"{index:5d}  {self._describe_step(step)}")
        returned = ", ".join(
            f"{p} = {self.values[v].name}"
            for p, v in zip(self.program.outputs, self.program.results, strict=True)
        )
        lines.append(f"  return {returned or 'nothing'}")
        return "\n".join(lines)

    def _value_of_input(self, index: int) -> int:
        return [i for i, v in enumerate(self.values) if v.storage is StorageKind.INPUT][index]

    def _describe_step(self, step: Step) -> str:
        match step:
            case Call(op, arguments, results, when, layer):
                written = [a for a, s in zip(arguments, op._schema.arguments, strict=True) if is_written(s)]
                read = [a for a, s in zip(arguments, op._schema.arguments, strict=True) if not is_written(s)]
                targets = [a.value for a in written] if results is None else results
                left = ", ".join("_" if t is None else self._describe_value(t) for t in targets)
                right = ", ".join(map(self._describe_argument, read))
                note = "" if layer is None else f"  # layer {layer}"
                return (
                    f"{left} = {op._schema.name.removeprefix('aten::')}({right}){_describe_when(when)}{note}"
                )
            case Launch(launch, arguments, when, layer):
                left = ", ".join(map(self._describe_value, step.written()))
                given = (a for i, a in enumerate(arguments) if i not in launch.outputs)
                right = ", ".join(map(self._describe_argument, given))
                note = "" if layer is None else f"  # layer {layer}"
                return f"{left} = kernel {launch.name}({right}){_describe_when(when)}{note}"
            case Check(_, inputs, results):
                checked, against = (", ".join(map(self._name, values)) for values in (results, inputs))
                return f"check {checked} against {against}"
            case Allocate(value, when):
                return f"allocate {self._describe_value(value)}{_describe_when(when)}"
            case Accumulate(accumulator, value, when):
                return f"{self.values[accumulator].name} += {self.values[value].name}{_describe_when(when)}"
            case AccumulateAll(accumulators, values, when):
                pairs = zip(accumulators, values, strict=True)
                sums = (f"{self.values[a].name} += {self.values[v].name}" for a, v in pairs)
                return f"one kernel: {', '.join(sums)}{_describe_when(when)}"
            case AdoptAsAccumulator(accumulator, value):
                names = self.values[accumulator].name, self.values[value].name
                return f"{names[0]} = {names[1]}, adopted{_describe_when(ActiveRuns.FIRST)}"
            case Release(value):
                return f"release {self.values[value].name}"

    def _describe_value(self, index: int) -> str:
        value = self.values[index]
        shape = f"{value.name}:{str(value.dtype).removeprefix('torch.')}{list(value.sizes)}"
        return f"{shape}@{value.index}" if value.storage is StorageKind.ARENA else shape

    def _describe_argument(self, argument: Any) -> str:
        if isinstance(argument, Ref):
            return self._name(argument.value)
        if isinstance(argument, (list, tuple)):
            return "[" + ", ".join(map(self._describe_argument, argument)) + "]"
        return str(argument)

    def _name(self, index: int) -> str:
        value = self.values[index]
        if value.storage is not StorageKind.VIEW:
            return value.name
        offset = f"+{value.offset}" if value.offset else ""
        return f"{self.values[value.index].name}{offset}<{list(value.sizes)}, strides {list(value.strides)}>"


def _describe_when(when: ActiveRuns) -> str:
    return {ActiveRuns.ALWAYS: "", ActiveRuns.FIRST: "  (first run)", ActiveRuns.LATER: "  (later runs)"}[
        when
    ]

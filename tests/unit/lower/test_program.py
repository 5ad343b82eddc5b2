"""Programs as data: their description, and the C++ program that they build."""

from __future__ import annotations

import torch

from gpipe_fast._extension import ActiveRuns, Arena
from gpipe_fast.lower.program import ProgramIR, StorageKind, Value
from gpipe_fast.lower.steps import Call, Ref
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole

aten, ALWAYS = torch.ops.aten, ActiveRuns.ALWAYS
CPU = torch.device("cpu")


def value(name: str, storage: StorageKind, *sizes: int, index: int = 0, offset: int = 0) -> Value:
    strides = torch.empty(sizes, device="meta").stride()
    return Value(name, storage, sizes, strides, torch.float32, index, offset)


def program() -> ProgramIR:
    """Returns a program that computes sin(x) + w in scratch memory, and returns the exponential."""
    return ProgramIR(
        inputs=(GraphPort(GraphRole.INPUT, 0),),
        outputs=(GraphPort(GraphRole.OUTPUT, 0),),
        values=[
            value("x", StorageKind.INPUT, 2, 3),
            value("w", StorageKind.PARAMETER, 3, index=1),
            value("sin", StorageKind.ARENA, 2, 3, index=64),
            value("exp", StorageKind.RESULT, 2, 3),
        ],
        steps=[
            Call(aten.sin.out, (Ref(0), Ref(2)), None, ALWAYS, 0),
            Call(aten.add.out, (Ref(2), Ref(1), 1, Ref(2)), None, ALWAYS, 1),
            Call(aten.exp.default, (Ref(2),), (3,), ALWAYS, 1),
        ],
        results=[3],
        arena_bytes=128,
    )


def test_a_program_is_built_and_runs() -> None:
    """Parameter 1 of the program is the second one that is bound, or the one that a list names."""
    x, w = torch.randn(2, 3), torch.randn(3)
    for parameters, bound in ((None, [torch.zeros(3), w]), ([5, 0], [w])):
        native = program().build(Arena(), CPU, parameters=parameters)
        native.bind(bound)
        (found,), _ = native.run([x], [], True)
        assert torch.equal(found, (x.sin() + w).exp())
        assert native.arena_bytes == 128

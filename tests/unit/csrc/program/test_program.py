"""Programs: what they keep alive, errors, shared arenas, and changed parameters."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast._extension import Arena
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.split import StageGraph, split
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole
from tests.heap import heap_bytes
from tests.reference import loop_step, pipeline_step
from tests.reference import unequal as unequal_results
from tests.stages import CPU, Runner, input_values, run_graph, run_graphs, saved, trace_joint, unequal

pytestmark = pytest.mark.usefixtures("one_thread")

INPUT, OUTPUT = GraphPort(GraphRole.INPUT, 0), GraphPort(GraphRole.OUTPUT, 0)


def mlp() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)]


def backward_of(layers: list[nn.Module], x: Tensor, fraction: float = 0.0) -> StageGraph:
    graph = split(trace_joint(layers, x), fraction).backward
    assert graph is not None
    return graph


def num_references(tensor: Tensor) -> int:
    """Returns how many tensors and programs refer to the tensor's memory."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def test_outputs_are_not_overwritten_by_the_next_run() -> None:
    layers, x = mlp(), torch.randn(4, 6, requires_grad=True)
    joint = trace_joint(layers, x)
    parts = split(joint, 1.0)
    runner = Runner(parts.forward, layers)
    first = runner(input_values(layers, joint, torch.ones(4, 6)))
    kept = {port: value.clone() for port, value in first.items()}
    runner(input_values(layers, joint, torch.zeros(4, 6)))
    assert unequal(first, kept) == []


class Concatenation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], 1)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_a_program_run_keeps_no_input_alive(fraction: float) -> None:
    layers = [*mlp(), nn.Flatten(0), nn.Unflatten(0, (4, 4)), Concatenation()]
    x = torch.randn(4, 6, requires_grad=True)
    joint = trace_joint(layers, x)
    parts = split(joint, fraction)
    assert parts.backward is not None
    forward, backward = Runner(parts.forward, layers), Runner(parts.backward, layers)
    values = input_values(layers, joint, x)
    values |= saved(forward(values))
    roles = (GraphRole.INPUT, GraphRole.SAVED, GraphRole.TANGENT, GraphRole.KEY)
    inputs = [value for port, value in values.items() if port.role in roles]
    before = [num_references(v) for v in inputs]
    backward(values)
    forward(values)
    assert [num_references(v) for v in inputs] == before


def test_an_operator_error_keeps_no_input_alive_and_the_next_run_is_correct() -> None:
    layers = [nn.Embedding(4, 8), nn.Linear(8, 8), nn.Embedding.from_pretrained(torch.ones(4, 8))]
    joint = trace_joint(layers[:2], torch.zeros(3, dtype=torch.int64))
    parts = split(joint, 0.0)
    runner = Runner(parts.forward, layers[:2])
    good, bad = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 4])
    values = input_values(layers[:2], joint, bad)
    before = num_references(values[INPUT])
    with pytest.raises(IndexError, match="index out of range"):
        runner(values)
    assert num_references(values[INPUT]) == before
    values = input_values(layers[:2], joint, good)
    assert unequal(runner(values), run_graph(parts.forward, values)) == []


@pytest.mark.parametrize("transposed", [INPUT, GraphPort(GraphRole.TANGENT, 0)], ids=str)
def test_inputs_with_other_strides_give_the_same_results(transposed: GraphPort) -> None:
    layers, x = [m.double() for m in mlp()], torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    joint = trace_joint(layers, x)
    graph = backward_of(layers, x)
    values = input_values(layers, joint, x)
    runner = Runner(graph, layers)
    expected = runner(values)
    values[transposed] = values[transposed].t().contiguous().t()
    for port, value in runner(values).items():
        torch.testing.assert_close(value, expected[port], rtol=1e-13, atol=1e-13)
    values[GraphPort(GraphRole.TANGENT, 0)] = torch.ones((), dtype=torch.float64).expand(4, 4)
    runner(values)


def test_a_program_refuses_other_shapes_and_dtypes() -> None:
    layers, x = mlp(), torch.randn(4, 6)
    graph = split(trace_joint(layers, x), 0.0).forward
    native = lower(graph).build(Arena(), CPU)
    native.bind([p.detach() for p in nn.Sequential(*layers).parameters()])
    with pytest.raises(RuntimeError, match=r"was lowered as Float\[4, 6\], got Float\[5, 6\]"):
        native.run([torch.randn(5, 6)], [], True)
    with pytest.raises(RuntimeError, match=r"was lowered as Float\[4, 6\], got Double\[4, 6\]"):
        native.run([torch.randn(4, 6).double()], [], True)
    with pytest.raises(RuntimeError, match="a program of 1 inputs got 2"):
        native.run([x, x], [], True)
    with pytest.raises(RuntimeError, match=r"parameter 0 was lowered as Float\[8, 6\], got"):
        native.bind([torch.ones(3, 3)] * 6)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_saved_tensors_may_have_another_size_than_in_the_trace(fraction: float) -> None:
    """An example is the reserve of cuDNN's batch norm, whose size only the library knows."""
    library = torch.library.Library("gpipe_fast_test", "FRAGMENT")
    library.define("reserving(Tensor x) -> (Tensor, Tensor)")
    library.impl("reserving", lambda x: (x * 2, torch.full((5,), 3, dtype=torch.uint8)), "CPU")
    reserving = torch.ops.gpipe_fast_test.reserving.default
    torch.library.register_fake(
        reserving, lambda x: (torch.empty_like(x), torch.empty(0, dtype=torch.uint8)), lib=library
    )

    class Reserving(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            result, reserve = reserving(x)
            ctx.save_for_backward(reserve)
            return result

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0].sum()

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Reserving.apply(x)

    layers, x = [Layer(), nn.Tanh()], torch.randn(4, 6, requires_grad=True)
    joint = trace_joint(layers, x)
    parts = split(joint, fraction)
    values = input_values(layers, joint, x)
    forward, backward = run_graphs(parts, values)
    ours = Runner(parts.forward, layers)(values)
    assert torch.equal(ours[OUTPUT], forward[OUTPUT])
    assert parts.backward is not None
    assert unequal(Runner(parts.backward, layers)(values | saved(ours)), backward) == []


def test_programs_share_an_arena() -> None:
    """A larger program makes the arena grow while a smaller one uses it, too."""
    small, large = mlp(), mlp()
    x, y = torch.randn(4, 6, requires_grad=True), torch.randn(256, 6, requires_grad=True)
    arena = Arena()
    runners = [Runner(backward_of(layers, z), layers, arena=arena) for layers, z in ((small, x), (large, y))]
    assert runners[0].program.arena_bytes < runners[1].program.arena_bytes
    values = [input_values(layers, trace_joint(layers, z), z) for layers, z in ((small, x), (large, y))]
    expected = [
        Runner(backward_of(layers, z), layers)(v)
        for layers, z, v in zip((small, large), (x, y), values, strict=True)
    ]
    for index in (0, 1, 0, 1):
        assert unequal(runners[index](values[index]), expected[index]) == []
    assert arena.bytes == runners[1].program.arena_bytes


def test_a_growing_arena_frees_the_smaller_block() -> None:
    """Programs of other sizes hold the arena until they run again; they must not keep its old block alive."""
    arena = Arena()
    sizes = (2**15, 2**16)  # rows of 64 bytes
    layers = [nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)]
    runners, others = [], []
    for rows in sizes:
        x = torch.randn(rows, 16, requires_grad=True)
        runners.append(Runner(backward_of(layers, x), layers, arena=arena))
        values = input_values(layers, trace_joint(layers, x), x)
        runners[-1](values)
        del values, x
        gc.collect()
        others.append(heap_bytes() - arena.bytes)
    assert arena.bytes == runners[1].program.arena_bytes > runners[0].program.arena_bytes >= 2**22
    assert others[1] - others[0] < runners[0].program.arena_bytes // 2


def test_a_program_reads_updated_and_rebound_parameters() -> None:
    """An in-place update takes effect at once; a replaced tensor takes effect when it is bound."""
    layers, x = mlp(), torch.randn(4, 6)
    joint = trace_joint(layers, x)
    graph = split(joint, 0.0).forward
    runner = Runner(graph, layers)
    parameters = list(nn.Sequential(*layers).parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(parameters, lr=0.1).step()
    model = nn.Sequential(*layers)
    assert torch.equal(runner(input_values(layers, joint, x))[OUTPUT], model(x))
    old = parameters[0].data
    parameters[0].data = torch.randn(8, 6)
    runner.native.bind([p.detach() for p in parameters])
    assert torch.equal(runner(input_values(layers, joint, x))[OUTPUT], model(x))
    assert num_references(old) == num_references(torch.ones(1))  # the program has released it


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_large_and_small_gradients_add_up_in_every_dtype_and_layout(
    dtype: torch.dtype, layout: torch.memory_format
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 300, 5), nn.Flatten(), nn.Linear(1200, 16))
    model.to(dtype).to(memory_format=layout)
    x = torch.randn(6, 3, 8, 8).to(dtype).to(memory_format=layout)
    found = pipeline_step(GPipe(model, [4], devices=["cpu"], chunks=3), x)
    assert unequal_results(found, loop_step(model, x, 3)) == []

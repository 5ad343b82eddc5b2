"""Gradient accumulation on fake devices; run by test_accumulation.py.

`accumulation_cases.py OPERATORS NAME...`: runs functions of this file by name, and prints the name of each.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast._extension import ActiveRuns
from gpipe_fast.lower.accumulation import MAX_COALESCED_GRADIENT_BYTES, MAX_PENDING_BYTES, AccumulationPolicy
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.program import ProgramIR
from gpipe_fast.lower.split import split
from gpipe_fast.lower.steps import Accumulate, AccumulateAll, Call, Release
from tests.described import describe
from tests.stages import trace_joint

WIDTH, CHUNKS, BATCH = 12, 4, 16
aten = torch.ops.aten


def block() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)]


def lowered_backward(
    layers: Sequence[nn.Module], accumulation: AccumulationPolicy, width: int = WIDTH
) -> ProgramIR:
    """Returns the lowered backward of a stage on a GPU."""
    for layer in layers:
        layer.cuda()
    parts = split(trace_joint(layers, torch.randn(4, width, device="cuda")), 0.0)
    assert parts.backward is not None
    return lower(parts.backward, accumulation)


def calls(program: ProgramIR, op: object) -> int:
    return sum(isinstance(step, Call) and step.op is op for step in program.steps)


def gradients_per_step(program: ProgramIR) -> list[int]:
    """Returns the number of gradients that each accumulation step of a program adds."""
    found = []
    for step in program.steps:
        if isinstance(step, AccumulateAll):
            found.append(len(step.values))
        elif isinstance(step, Accumulate):
            found.append(1)
    return found


def weight_gradients_use_addmm() -> None:
    """The last step adds the other four gradients: two biases, and a norm's two parameters."""
    program = lowered_backward(block(), AccumulationPolicy())
    assert calls(program, aten.addmm.out) >= 2, describe(program)
    assert gradients_per_step(program) == [4], describe(program)
    last = [step for step in program.steps if not isinstance(step, Release)][-1]
    assert isinstance(last, AccumulateAll), describe(program)


def deterministic_weight_gradients_use_no_addmm() -> None:
    program = lowered_backward(block(), AccumulationPolicy(deterministic=True))
    in_place = [
        step
        for step in program.steps
        if isinstance(step, Call) and step.op is aten.addmm.out and step.arguments[0] == step.arguments[-1]
    ]
    assert not in_place, describe(program)
    assert gradients_per_step(program) == [6], describe(program)


def float32_gradients_use_no_addmm() -> None:
    layers = [layer.bfloat16() for layer in block()]
    for layer in layers:
        layer.cuda()
    parts = split(trace_joint(layers, torch.randn(4, WIDTH, device="cuda", dtype=torch.bfloat16)), 0.0)
    assert parts.backward is not None
    program = lower(parts.backward, AccumulationPolicy(torch.float32))
    assert gradients_per_step(program) == [6], describe(program)


def casts_are_fused_into_accumulation() -> None:
    """Under autocast, bfloat16 gradients are added to float32 accumulators without a separate cast."""
    layers = [layer.cuda() for layer in block()]
    with torch.autocast("cuda", torch.bfloat16):
        parts = split(trace_joint(layers, torch.randn(4, WIDTH, device="cuda")), 0.0)
    assert parts.backward is not None
    program = lower(parts.backward)
    values = program.values
    added = {
        (values[a].dtype, values[v].dtype)
        for step in program.steps
        if isinstance(step, AccumulateAll)
        for a, v in zip(step.accumulators, step.values, strict=True)
    }
    assert (torch.float32, torch.bfloat16) in added, describe(program)
    later = [s for s in program.steps if isinstance(s, Call) and s.when is ActiveRuns.LATER]
    assert not any(step.op is aten.copy_.default for step in later), describe(program)


def tied_gradients_are_added_one_by_one() -> None:
    """Gradients of a tied parameter are added in autograd's order."""
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.bias = first.bias
    program = lowered_backward([first, second], AccumulationPolicy())
    assert gradients_per_step(program) == [1, 1], describe(program)


def large_gradients_are_added_at_once() -> None:
    """Smaller gradients are added together, but only up to a limit, since waiting gradients hold memory."""
    width = MAX_COALESCED_GRADIENT_BYTES // 4  # elements; a norm has two such parameters
    program = lowered_backward([nn.LayerNorm(width) for _ in range(6)], AccumulationPolicy(), width)
    most = MAX_PENDING_BYTES // MAX_COALESCED_GRADIENT_BYTES
    assert gradients_per_step(program) == [most, 12 - most], describe(program)
    program = lowered_backward([nn.LayerNorm(width + 1)], AccumulationPolicy(), width + 1)
    assert gradients_per_step(program) == [1, 1], describe(program)


def plain_loop(model: nn.Sequential, x: Tensor) -> Tensor:
    return torch.cat([model(part) for part in x.chunk(CHUNKS)])


def gradients(model: nn.Module, output: Tensor) -> list[Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    output.square().sum().backward()
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def deterministic_gradients_equal_the_plain_loop() -> None:
    """A pipeline notices deterministic mode when it is turned on between calls."""
    # So wide that fused addmm gives different bits.
    model = nn.Sequential(nn.Linear(WIDTH, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 8)).cuda()
    pipe = GPipe(copy.deepcopy(model), [2, 2], devices=["cuda:0", "cuda:0"], chunks=CHUNKS)
    x = torch.randn(CHUNKS * 700, WIDTH, device="cuda")
    expected = gradients(model, plain_loop(model, x))
    fused = gradients(pipe, pipe(x))
    assert not all(map(torch.equal, fused, expected)), "the test shows nothing: fused addmm gave equal bits"
    for ours, one in zip(fused, expected, strict=True):
        torch.testing.assert_close(ours, one, rtol=1e-4, atol=1e-2)
    torch.use_deterministic_algorithms(True)
    assert all(map(torch.equal, gradients(pipe, pipe(x)), expected))


def float32_gradients_equal_a_float32_loop() -> None:
    """The reference loop adds in float32, and rounds at the end; the stages are on two devices."""
    model = nn.Sequential(*block(), *block()).bfloat16()
    pipe = GPipe(
        copy.deepcopy(model),
        [4, 4],
        devices=["cuda:0", "cuda:1"],
        chunks=CHUNKS,
        grad_dtype=torch.float32,
    )
    x = torch.randn(BATCH, WIDTH).bfloat16()
    parameters = list(model.cuda().parameters())  # a layer norm on a GPU has fp32 statistics
    parts = x.cuda().chunk(CHUNKS)
    found = [torch.autograd.grad(model(part).square().sum(), parameters) for part in reversed(parts)]
    for _ in range(3):
        ours = gradients(pipe, pipe(x.cuda()))
        assert all(gradient.dtype is torch.bfloat16 for gradient in ours)
        for gradient, each in zip(ours, zip(*found, strict=True), strict=True):
            total = each[0].float()
            for one in each[1:]:
                total = total + one.float()
            assert torch.equal(gradient.cpu(), total.bfloat16().cpu())


def autocast_gradients_equal_the_plain_loop() -> None:
    """The plain loop runs with autocast's cache disabled."""
    model = nn.Sequential(*block(), *block()).cuda()
    pipe = GPipe(copy.deepcopy(model), [4, 4], devices=["cuda:0", "cuda:0"], chunks=CHUNKS)
    x = torch.randn(BATCH, WIDTH, device="cuda")
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            expected, ours = plain_loop(model, x), pipe(x)
        assert all(map(torch.equal, gradients(pipe, ours), gradients(model, expected)))


def main() -> None:
    operators, *names = sys.argv[1:]
    torch.ops.load_library(operators)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    functions: dict[str, Callable[[], None]] = {f.__name__: f for f in (*PROGRAMS, *BITS)}
    for name in names:
        functions[name]()
        print(name)


PROGRAMS = (
    weight_gradients_use_addmm,
    deterministic_weight_gradients_use_no_addmm,
    float32_gradients_use_no_addmm,
    casts_are_fused_into_accumulation,
    tied_gradients_are_added_one_by_one,
    large_gradients_are_added_at_once,
)
BITS = (
    float32_gradients_equal_a_float32_loop,
    autocast_gradients_equal_the_plain_loop,
    deterministic_gradients_equal_the_plain_loop,
)

if __name__ == "__main__":
    main()

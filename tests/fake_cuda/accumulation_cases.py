"""Gradient accumulation on fake devices; run by test_accumulation.py.

`accumulation_cases.py OPERATORS NAME...`: runs functions of this file by name, and prints the name of each.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast._extension import ActiveRuns
from gpipe_fast.lower.accumulation import AccumulationPolicy
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.program import ProgramIR
from gpipe_fast.lower.split import split
from gpipe_fast.lower.steps import Accumulate, AccumulateAll, Call
from tests.fake_cuda.fake_devices import copied, gradients, plain_loop, run_cases
from tests.fake_cuda.train_models import MovingSequential, TiedLinear
from tests.internals import pipeline_of, with_hoisted_casts
from tests.stages import trace_joint

WIDTH, CHUNKS, BATCH = 12, 4, 16
aten = torch.ops.aten


def block() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)]


def lowered_backward(layers: Sequence[nn.Module], *policy: AccumulationPolicy) -> ProgramIR:
    """Returns the lowered backward of a stage on a GPU."""
    x = torch.randn(4, WIDTH, device="cuda")
    parts = split(trace_joint([layer.cuda() for layer in layers], x), 0.0)
    assert parts.backward is not None
    return lower(parts.backward, *policy)


def gradients_per_step(program: ProgramIR) -> list[int]:
    """Returns the number of gradients that each accumulation step of a program adds."""
    steps = [step for step in program.steps if isinstance(step, Accumulate | AccumulateAll)]
    return [len(step.values) if isinstance(step, AccumulateAll) else 1 for step in steps]


def weight_gradients_use_addmm_unless_deterministic() -> None:
    """One step adds the other four gradients: two biases, and a norm's two parameters."""
    program = lowered_backward(block(), AccumulationPolicy())
    products = [step for step in program.steps if isinstance(step, Call) and step.op is aten.addmm.out]
    assert len(products) >= 2, program.steps
    assert gradients_per_step(program) == [4], program.steps
    program = lowered_backward(block(), AccumulationPolicy(deterministic=True))
    assert gradients_per_step(program) == [6], program.steps


def casts_are_fused_into_accumulation() -> None:
    """Under autocast, bfloat16 gradients are added to float32 accumulators without a separate cast."""
    with torch.autocast("cuda", torch.bfloat16):
        program = lowered_backward(block())
    added = {
        (program.values[a].dtype, program.values[v].dtype)
        for step in program.steps
        if isinstance(step, AccumulateAll)
        for a, v in zip(step.accumulators, step.values, strict=True)
    }
    assert (torch.float32, torch.bfloat16) in added, program.steps
    later = [s for s in program.steps if isinstance(s, Call) and s.when is ActiveRuns.LATER]
    assert not any(step.op is aten.copy_.default for step in later), program.steps


def tied_gradients_are_added_one_by_one() -> None:
    """Gradients of a tied parameter are added in autograd's order."""
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.bias = first.bias
    program = lowered_backward([first, second], AccumulationPolicy())
    assert gradients_per_step(program) == [1, 1], program.steps


def deterministic_gradients_equal_the_plain_loop() -> None:
    """A pipeline notices deterministic mode when it is turned on between calls."""
    # So wide that fused addmm gives different bits.
    model = nn.Sequential(nn.Linear(WIDTH, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 8)).cuda()
    pipe = GPipe(copied(model), [2, 2], devices=["cuda:0", "cuda:0"], chunks=CHUNKS)
    x = torch.randn(CHUNKS * 700, WIDTH, device="cuda")
    expected = gradients(model, plain_loop(model, x, CHUNKS))
    fused = gradients(pipe, pipe(x))
    assert not all(map(torch.equal, fused, expected)), "the test shows nothing: fused addmm gave equal bits"
    for ours, one in zip(fused, expected, strict=True):
        torch.testing.assert_close(ours, one, rtol=1e-4, atol=1e-2)
    torch.use_deterministic_algorithms(True)
    assert all(map(torch.equal, gradients(pipe, pipe(x)), expected))


def float32_gradients_equal_a_float32_loop() -> None:
    """The reference loop adds in float32, and rounds at the end; the stages are on two devices."""
    model = nn.Sequential(*block(), *block()).bfloat16()
    devices = ["cuda:0", "cuda:1"]
    pipe = GPipe(copied(model), [4, 4], devices=devices, chunks=CHUNKS, grad_dtype=torch.float32)
    x = torch.randn(BATCH, WIDTH).bfloat16()
    parameters = list(model.cuda().parameters())  # a layer norm on a GPU has fp32 statistics
    parts = x.cuda().chunk(CHUNKS)
    found = [torch.autograd.grad(model(part).square().sum(), parameters) for part in reversed(parts)]
    for _ in range(3):
        for ours, each in zip(gradients(pipe, pipe(x.cuda())), zip(*found, strict=True), strict=True):
            total = functools.reduce(torch.add, (one.float() for one in each))
            assert torch.equal(ours, total.bfloat16().cpu())


def autocast_steps_equal_the_plain_loop() -> None:
    """Each step casts the parameters' present values once, also in graphs, and those of a replica."""
    for tied, other, checkpoint, capture in (
        (False, "cuda:0", "except_last", False),
        (False, "cuda:1", "always", True),
        (True, "cuda:0", "never", True),
        (True, "cuda:1", "except_last", True),
    ):
        layers = [nn.Linear(WIDTH, WIDTH), *block(), nn.Linear(WIDTH, WIDTH)]
        layers[-1] = TiedLinear(layers[0]) if tied else layers[-1]
        devices = ["cuda:0", other]
        options = {"devices": devices, "checkpoint": checkpoint, "capture": capture}
        pipe = GPipe(copied(layers), [3, 3], chunks=CHUNKS, **options)
        loop = MovingSequential(layers, [device for device in devices for _ in range(3)])
        for _ in range(5):
            x = torch.randn(BATCH, WIDTH, device="cuda:0")
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False), with_hoisted_casts():
                ours, expected = pipe(x), plain_loop(loop, x, CHUNKS)
                found = gradients(pipe, ours)
            assert torch.equal(ours.cpu(), expected.cpu()), (tied, other)
            assert all(map(torch.equal, found, gradients(loop, expected))), (tied, other)
            with torch.no_grad():
                for model in (pipe, loop):
                    for index, parameter in enumerate(model.parameters()):
                        parameter.mul_(0.9 + 0.01 * index)
        replays = sum(report.replays for report in pipeline_of(pipe).graph_reports())
        assert replays == (3 if capture else 0)


CASES = (
    weight_gradients_use_addmm_unless_deterministic,
    casts_are_fused_into_accumulation,
    tied_gradients_are_added_one_by_one,
    float32_gradients_equal_a_float32_loop,
    autocast_steps_equal_the_plain_loop,
    deterministic_gradients_equal_the_plain_loop,
)

if __name__ == "__main__":
    run_cases({case.__name__: case for case in CASES}, deterministic=False)

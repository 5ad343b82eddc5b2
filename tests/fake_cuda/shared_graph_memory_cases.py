"""Several captured plans of one pipeline that share memory; run by test_graphs.py.

`shared_graph_memory_cases.py OPERATORS CASES DEVICES`: compares with the plain loop and prints as
graph_cases.py does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, doctor, replicate
from tests.fake_cuda.graph_cases import PipelineAndLoop, run_cases
from tests.fake_cuda.train_models import BATCH, WIDTH
from tests.internals import pipeline_of

HALF = BATCH // 2


def train(both: PipelineAndLoop, seed: int, samples: int) -> None:
    both.run_both(lambda model, _: train_step(model, both.input(seed)[:samples]))


def train_step(model: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    y = model(x)
    y.square().mean().backward()
    return [y.detach()]


def infer(both: PipelineAndLoop, seed: int, samples: int) -> None:
    def do(model: Callable[[Tensor], Tensor], _: nn.Module) -> list[Tensor]:
        with torch.no_grad():
            return [model(both.input(seed)[:samples])]

    both.run_both(do)


def replays(both: PipelineAndLoop) -> int:
    return sum(report.replays for report in both.reports())


def inference_before_a_backward(both: PipelineAndLoop) -> None:
    """Inference runs between a forward and its backward, as with a teacher network."""
    for seed in range(4):
        infer(both, seed, HALF)
    for seed in range(4):
        train(both, seed, BATCH)

    def do(model: Callable[[Tensor], Tensor], _: nn.Module) -> list[Tensor]:
        y = model(both.input(5))
        with torch.no_grad():
            other = model(both.input(6)[:HALF])
        y.square().mean().backward()
        return [y.detach(), other]

    for _ in range(3):
        both.run_both(do)
    both.expect("both are captured", sorted(r.backward for r in both.reports()) == [False, True])


def two_shapes_in_flight(both: PipelineAndLoop, *, first_captured: int) -> None:
    """The forwards of two shapes run first, then their backwards in either order."""
    shapes = {BATCH: HALF, HALF: BATCH}
    for samples in (first_captured, shapes[first_captured]):
        for seed in range(4):
            train(both, seed, samples)

    def do(model: Callable[[Tensor], Tensor], _: nn.Module, samples: int, first: int) -> list[Tensor]:
        outputs = [model(both.input(1)[:samples]), model(both.input(2)[: shapes[samples]])]
        outputs[first].square().mean().backward()
        outputs[1 - first].square().mean().backward()
        return [y.detach() for y in outputs]

    for samples in shapes:
        for first in (0, 1):
            both.run_both(partial(do, samples=samples, first=first))
    for samples in shapes:
        train(both, 3, samples)


def capture_while_another_plan_is_in_flight(both: PipelineAndLoop) -> None:
    """The second shape reaches its capture between a forward and its backward."""
    for seed in range(4):
        train(both, seed, BATCH)

    def do(model: Callable[[Tensor], Tensor], _: nn.Module) -> list[Tensor]:
        y = model(both.input(7))
        for seed in range(4):
            train_step(model, both.input(seed)[:HALF])
        y.square().mean().backward()
        return [y.detach()]

    for _ in range(2):
        both.run_both(do)


def graphs_freed_between_forward_and_backward(both: PipelineAndLoop) -> None:
    """The plan's graphs are freed, and other plans are captured in the same memory."""
    for seed in range(4):
        train(both, seed, BATCH)

    def do(model: Callable[[Tensor], Tensor], _: nn.Module) -> list[Tensor]:
        y = model(both.input(7))
        pipeline_of(both.pipeline).forget_graphs()
        for seed in range(5):
            train_step(model, both.input(seed)[:HALF])
        y.square().mean().backward()
        return [y.detach()]

    for _ in range(2):
        both.run_both(do)
    for seed in range(4):
        train(both, seed, BATCH)


def kept_output_blocks_replays(both: PipelineAndLoop) -> None:
    """An output whose backward is pending blocks replays of all other plans, which share its memory."""
    for samples in (BATCH, HALF):
        for seed in range(4):
            train(both, seed, samples)
    kept = both.pipeline(both.input(1))
    before = replays(both)
    train(both, 2, HALF)
    both.expect("the other plan runs uncaptured", replays(both) == before)
    del kept
    train(both, 2, HALF)
    train(both, 2, BATCH)
    both.expect("both are replayed again", replays(both) == before + 2)


def replicated_gradient(both: PipelineAndLoop) -> None:
    """Checks the gradient of an input that is replicated to every micro-batch; here there is one."""

    class Scaled(nn.Linear):
        def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
            x, scale = inputs
            return super().forward(x) * scale

    device = both.devices[0]
    model = nn.Sequential(Scaled(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.GELU()).to(device)
    pipe = GPipe(copy.deepcopy(model), [2, 2], devices=[device] * 2, chunks=1)
    kept, expected = [], []
    for seed in range(6):
        torch.manual_seed(seed)
        x, scale = torch.randn(BATCH, WIDTH).to(device), torch.randn(WIDTH).to(device).requires_grad_()
        kept += torch.autograd.grad(pipe((x, replicate(scale))).square().mean(), [scale])
        expected += torch.autograd.grad(model((x, scale)).square().mean(), [scale])
    both.compare("gradients", kept, expected)
    both.expect("steps are replayed", any(r.replays > 2 for r in pipeline_of(pipe).graph_reports()))


def allocator_cannot_capture(both: PipelineAndLoop) -> None:
    both.warm_up()
    both.step(5)
    (report,) = both.reports()
    both.expect("nothing is replayed", (report.uncaptured, report.replays) == (5, 0))
    both.expect(f"the obstacle is known: {report.obstacle}", "allocator" in report.obstacle)
    both.expect("the report has it", report.obstacle in doctor(both.pipeline))


CASES = {
    case.__name__: case
    for case in (
        inference_before_a_backward,
        capture_while_another_plan_is_in_flight,
        graphs_freed_between_forward_and_backward,
        kept_output_blocks_replays,
        replicated_gradient,
        allocator_cannot_capture,
    )
} | {
    f"two_shapes_in_flight_{samples}_first": partial(two_shapes_in_flight, first_captured=samples)
    for samples in (BATCH, HALF)
}


if __name__ == "__main__":
    run_cases(CASES)

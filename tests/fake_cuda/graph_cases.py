"""Changes between graph replays; run by test_graphs.py with the fake runtime preloaded.

`graph_cases.py OPERATORS CASES DEVICES`: loads the operators, and for each case
(``inference/backward_twice/..``) compares a pipeline whose steps are replayed as graphs with the plain loop.
Prints for each case the differences, or "equal".
"""

from __future__ import annotations

import copy
import ctypes
import random
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, doctor
from gpipe_fast._extension import GraphReport
from tests.fake_cuda.train_models import BATCH, CHUNKS, WIDTH, MovingSequential, layers_of
from tests.internals import pipeline_of


class PipelineAndLoop:
    """A pipeline and the plain loop, which do the same; collects their differences."""

    def __init__(
        self, layers: Sequence[nn.Module], devices: Sequence[str], checkpoint: str = "always"
    ) -> None:
        self.devices = devices
        self.pipeline = GPipe(
            nn.Sequential(*copy.deepcopy(list(layers))),
            [2] * len(devices),
            devices=devices,
            chunks=CHUNKS,
            checkpoint=checkpoint,
        )
        for index, layer in enumerate(layers):
            layer.to(devices[index // 2])
        self.loop = MovingSequential(layers, devices)
        self.batch_dim = 0
        self.differences: list[str] = []
        self._mark = ctypes.CDLL(None).fake_cuda_mark
        self._count = 0

    def plain(self, x: Tensor) -> Tensor:
        parts = [self.loop(part) for part in x.chunk(CHUNKS, self.batch_dim)]  # type: ignore[arg-type]
        return torch.cat(parts, self.batch_dim)

    def run_both(self, do: Callable[[Callable[[Tensor], Tensor], nn.Module], object]) -> None:
        """Runs a function with both, and compares the results and all gradients."""
        self._mark(b"begin")
        ours = do(self.pipeline, self.pipeline)
        self._mark(b"end")
        self.compare("returned", ours, do(self.plain, self.loop))
        pairs = zip(self.pipeline.parameters(), self.loop.parameters(), strict=True)
        for index, (parameter, expected) in enumerate(pairs):
            self.compare(f"gradient {index}", parameter.grad, expected.grad)
        self.zero_grad()

    def zero_grad(self) -> None:
        for parameter in (*self.pipeline.parameters(), *self.loop.parameters()):
            parameter.grad = None

    def compare(self, what: str, ours: object, expected: object) -> None:
        self._count += 1
        if isinstance(ours, (list, tuple)) and isinstance(expected, (list, tuple)):
            equal = all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(ours, expected, strict=True))
        elif isinstance(ours, Tensor) and isinstance(expected, Tensor):
            equal = torch.equal(ours.cpu(), expected.cpu())
        else:
            equal = ours is None and expected is None
        if not equal:
            self.differences.append(f"{self._count}: {what}")

    def input(self, seed: int) -> Tensor:
        torch.manual_seed(seed)
        before = [3] * self.batch_dim
        return torch.randn(*before, BATCH, WIDTH).to(self.devices[0]).requires_grad_()

    def step(self, seed: int) -> None:
        def do(model: Callable[[Tensor], Tensor], _: nn.Module) -> object:
            x = self.input(seed)
            y = model(x)
            y.square().mean().backward()
            return [y.detach(), x.grad]

        self.run_both(do)

    def warm_up(self) -> None:
        for seed in range(4):
            self.step(seed)

    def reports(self) -> list[GraphReport]:
        return [r for r in pipeline_of(self.pipeline).graph_reports() if r.uncaptured + r.replays > 2]

    def expect(self, what: str, holds: bool) -> None:
        if not holds:
            self.differences.append(what)


def replaced_parameter(both: PipelineAndLoop) -> None:
    """A parameter at a new address requires a new capture."""
    both.warm_up()
    for model in (both.pipeline, both.loop):
        weight = next(model.parameters())
        weight.data = weight.data * 2 + 1
    for seed in range(3):
        both.step(seed)
    (report,) = both.reports()
    both.expect("all but two are replayed", (report.uncaptured, report.replays) == (2, 5))


def two_forwards_in_flight(both: PipelineAndLoop) -> None:
    """The second forward runs before the first backward."""
    both.warm_up()

    def do(model: Callable[[Tensor], Tensor], _: nn.Module) -> object:
        first, second = model(both.input(1)), model(both.input(2))
        first.square().mean().backward()
        second.mean().backward()
        return [first.detach(), second.detach()]

    for _ in range(2):
        both.run_both(do)
    both.step(3)
    (report,) = both.reports()
    both.expect("one of two forwards is replayed", (report.uncaptured, report.replays) == (4, 5))


def backward_twice(both: PipelineAndLoop) -> None:
    both.warm_up()

    def do(model: Callable[[Tensor], Tensor], _: nn.Module) -> object:
        x = both.input(1)
        y = model(x)
        y.square().mean().backward(retain_graph=True)
        y.sigmoid().mean().backward()
        return [x.grad]

    for _ in range(2):
        both.run_both(do)
    (report,) = both.reports()
    both.expect("all but two are replayed", (report.uncaptured, report.replays) == (2, 4))


def other_gradient_layouts(both: PipelineAndLoop) -> None:
    """Output gradients in another layout run uncaptured at first, and then get own graphs."""
    losses: list[Callable[[Tensor], Tensor]] = [Tensor.sum, lambda y: y.t().contiguous().square().sum()]

    def backward_by(loss: Callable[[Tensor], Tensor]) -> Callable[..., object]:
        def do(model: Callable[[Tensor], Tensor], _: nn.Module) -> object:
            x = both.input(1)
            loss(model(x)).backward()
            return [x.grad]

        return do

    both.warm_up()
    for loss in losses * 2:
        for _ in range(5):
            both.run_both(backward_by(loss))
    reports = both.reports()
    both.expect("each of three layouts has its graphs", len(reports) == 3)
    both.expect("forward and backward are captured", all(r.forward and r.backward for r in reports))


def inference(both: PipelineAndLoop) -> None:
    """Later replays do not overwrite returned outputs."""

    def do(model: Callable[[Tensor], Tensor], module: nn.Module) -> object:
        module.eval()
        with torch.no_grad():
            return [model(both.input(seed)) for seed in range(5)]

    both.run_both(do)
    (report,) = both.reports()
    both.expect("the forward is captured alone", report.forward and not report.backward)
    both.expect("all but two are replayed", (report.uncaptured, report.replays) == (2, 3))


def kept_gradients(both: PipelineAndLoop) -> None:
    """Later steps do not overwrite the gradients of earlier steps."""
    both.warm_up()

    def do(model: Callable[[Tensor], Tensor], module: nn.Module) -> object:
        kept = []
        for seed in range(3):
            model(both.input(seed)).square().mean().backward()
            kept += [parameter.grad for parameter in module.parameters()]
            for parameter in module.parameters():
                parameter.grad = None
        for seed in range(2):  # accumulates into existing gradients
            model(both.input(seed)).square().mean().backward()
        return kept

    both.run_both(do)


def forward_cannot_be_captured(both: PipelineAndLoop) -> None:
    """Steps run uncaptured, and the report says why; FAKE_CUDA_SYNCHRONIZES names the operator."""
    both.warm_up()
    both.step(5)
    (report,) = both.reports()
    both.expect("nothing is replayed", (report.uncaptured, report.replays) == (5, 0))
    both.expect(f"the obstacle is known: {report.obstacle}", "captur" in report.obstacle)
    place = "in action 0F0: stage 0, layer 1 (GELU), micro-batch 0: "
    both.expect(f"its place is known: {report.obstacle}", report.obstacle.startswith(place))
    both.expect("the report has it", report.obstacle in doctor(both.pipeline))


def backward_cannot_be_captured(both: PipelineAndLoop) -> None:
    """The forward could be captured, but its graphs are freed."""
    both.warm_up()
    both.step(5)
    (report,) = both.reports()
    both.expect("nothing is replayed", (report.uncaptured, report.replays) == (5, 0))
    both.expect(f"the obstacle is known: {report.obstacle}", "captur" in report.obstacle)
    both.expect("the forward is dropped", not report.forward)


def capture_turned_off(both: PipelineAndLoop) -> None:
    """Capture is turned off between a forward and its backward."""
    both.warm_up()

    def do(model: Callable[[Tensor], Tensor], module: nn.Module) -> object:
        y = model(both.input(1))
        both.pipeline.capture = False
        y.square().mean().backward()
        return [y.detach()]

    both.run_both(do)
    both.step(2)
    both.expect("no graph is left", both.reports() == [])
    both.pipeline.capture = True
    both.warm_up()
    (report,) = both.reports()
    both.expect("all but two are replayed again", (report.uncaptured, report.replays) == (2, 3))


def changed_setting(both: PipelineAndLoop) -> None:
    """A changed setting requires a new capture."""
    both.warm_up()
    torch.backends.cudnn.benchmark = True
    for seed in range(4):
        both.step(seed)
    torch.backends.cudnn.benchmark = False
    (report,) = both.reports()
    both.expect("it warms up again", report.replays == 4)


def alternating_shapes(both: PipelineAndLoop) -> None:
    """Mini-batches of two shapes alternate."""
    for seed in range(5):
        both.step(seed)

        def do(model: Callable[[Tensor], Tensor], _: nn.Module, seed: int = seed) -> object:
            y = model(both.input(seed)[: BATCH // 2])
            y.square().mean().backward()
            return [y.detach()]

        both.run_both(do)
    both.expect("both are captured", [r.forward and r.backward for r in both.reports()] == [True, True])


def num_captures() -> int:
    return int(ctypes.CDLL(None).fake_cuda_num_captures())


def more_shapes_than_places(both: PipelineAndLoop) -> None:
    """Eight of ten random shapes are captured, once each; the shape of a later phase takes over a place."""

    def infer(samples: int) -> None:
        with torch.no_grad():
            x = both.input(samples)[:samples]
            both.compare(f"{samples} samples", both.pipeline(x), both.plain(x))

    before = num_captures()
    chosen = random.Random(0)
    for _ in range(100):
        infer(chosen.randrange(CHUNKS // 2, CHUNKS // 2 + 10))
    captures = num_captures() - before
    both.expect(f"eight of ten shapes are captured, got {captures} captures", captures == 8)
    replays = sum(report.replays for report in both.reports())
    both.expect(f"most mini-batches are replayed, got {replays}", replays > 50)
    before = num_captures()
    for _ in range(12):
        infer(BATCH)
    captures = num_captures() - before
    both.expect(f"the only shape of a later phase is captured, got {captures} captures", captures == 1)


def batch_in_second_dimension(both: PipelineAndLoop) -> None:
    both.batch_dim = both.pipeline.batch_dim = 1
    both.warm_up()
    (report,) = both.reports()
    both.expect("all but two are replayed", (report.uncaptured, report.replays) == (2, 2))


def several_threads(both: PipelineAndLoop) -> None:
    """Each thread uses an own stream."""
    both.warm_up()
    for seed in range(4):

        def run(seed: int = seed) -> None:
            with torch.cuda.stream(torch.cuda.Stream(both.devices[0])):
                both.step(seed)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()


CASES = {
    case.__name__: case
    for case in (
        replaced_parameter,
        two_forwards_in_flight,
        backward_twice,
        other_gradient_layouts,
        inference,
        kept_gradients,
        forward_cannot_be_captured,
        backward_cannot_be_captured,
        capture_turned_off,
        changed_setting,
        alternating_shapes,
        more_shapes_than_places,
        batch_in_second_dimension,
        several_threads,
    )
}


def run_cases(cases: Mapping[str, Callable[[PipelineAndLoop], None]]) -> None:
    """Runs the cases that the command line names."""
    operators, names, devices, *checkpoint = sys.argv[1:]
    torch.ops.load_library(operators)
    torch.backends.cudnn.enabled = False
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # otherwise addmm may add unrounded products to gradients
    for case in names.split("/"):
        torch.manual_seed(0)
        ctypes.CDLL(None).fake_cuda_mark(b"plan")
        both = PipelineAndLoop(layers_of("mlp"), devices.split(","), *checkpoint)
        cases[case](both)
        print(f"{case}: {'; '.join(both.differences) or 'equal'}")


if __name__ == "__main__":
    run_cases(CASES)

"""Changes between graph replays, and plans that share memory; run by test_graphs.py.

`graph_cases.py OPERATORS CASES DEVICES [CHECKPOINT]`: for each case (``inference/backward_twice/..``),
compares a pipeline whose steps are replayed as graphs with the plain loop. Prints for each case the
differences, or "equal".
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import sys
import threading
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, doctor, replicate
from gpipe_fast._extension import GraphReport
from tests.fake_cuda.fake_devices import caller_streams, copied, load, mark
from tests.fake_cuda.train_models import BATCH, CHUNKS, WIDTH, MovingSequential, layers_of
from tests.internals import pipeline_of

HALF = BATCH // 2
POOL_SIZE = 32  # streams per device that torch hands out round-robin

Model = Callable[[Tensor], Tensor]


class PipelineAndLoop:
    """A pipeline and the plain loop, which do the same; collects their differences."""

    def __init__(
        self,
        devices: Sequence[str],
        checkpoint: str = "always",
        balance: Sequence[int] = (2, 2, 2, 2),
        **options: object,
    ) -> None:
        self.devices, layers = devices, layers_of("mlp")
        self.pipeline = GPipe(
            copied(layers),
            balance,
            devices=devices,
            chunks=CHUNKS,
            checkpoint=checkpoint,
            **{"capture": True, **options},
        )
        places = [device for device, number in zip(devices, balance, strict=True) for _ in range(number)]
        self.loop = MovingSequential(layers, places)
        self.differences: list[str] = []
        self._count = 0

    def plain(self, x: Tensor) -> Tensor:
        return torch.cat([self.loop(part) for part in x.chunk(CHUNKS)])  # type: ignore[misc]

    def run_both(self, do: Callable[[Model, nn.Module], object]) -> None:
        """Runs a function with both, and compares the results and all gradients."""
        mark("begin")
        ours = do(self.pipeline, self.pipeline)
        mark("end")
        self.compare("returned", ours, do(self.plain, self.loop))
        pairs = zip(self.pipeline.parameters(), self.loop.parameters(), strict=True)
        for index, (parameter, expected) in enumerate(pairs):
            self.compare(f"gradient {index}", parameter.grad, expected.grad)
        self.pipeline.zero_grad()
        self.loop.zero_grad()

    def compare(self, what: str, ours: object, expected: object) -> None:
        self._count += 1
        if isinstance(ours, (list, tuple)) and isinstance(expected, (list, tuple)):
            equal = all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(ours, expected, strict=True))
        elif isinstance(ours, Tensor) and isinstance(expected, Tensor):
            equal = torch.equal(ours.cpu(), expected.cpu())
        else:
            equal = ours is None and expected is None
        self.expect(f"{self._count}: {what}", equal)

    def input(self, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.randn(BATCH, WIDTH).to(self.devices[0]).requires_grad_()

    def train(self, *seeds: int, samples: int = BATCH) -> None:
        """Runs a step for each seed."""
        for seed in seeds:
            self.run_both(lambda model, _, seed=seed: train_step(model, self.input(seed), samples))

    def warm_up(self, samples: int = BATCH) -> None:
        self.train(0, 1, 2, 3, samples=samples)

    def infer(self, seed: int, samples: int) -> None:
        with torch.no_grad():
            self.run_both(lambda model, _: [model(self.input(seed)[:samples])])

    def reports(self) -> list[GraphReport]:
        return [r for r in pipeline_of(self.pipeline).graph_reports() if r.uncaptured + r.replays > 2]

    def replays(self) -> int:
        return sum(report.replays for report in self.reports())

    def expect(self, what: str, holds: object) -> None:
        if not holds:
            self.differences.append(what)

    def expect_counts(self, uncaptured: int, replays: int) -> GraphReport:
        """Expects one plan, and so many steps without and with a replay."""
        (report,) = self.reports()
        found = (report.uncaptured, report.replays)
        self.expect(f"{found} steps uncaptured and replayed", found == (uncaptured, replays))
        return report


def train_step(model: Model, x: Tensor, samples: int = BATCH) -> list[Tensor | None]:
    y = model(x[:samples])
    y.square().mean().backward()
    return [y.detach(), x.grad]


def replaced_parameter(both: PipelineAndLoop) -> None:
    """A parameter at a new address requires a new capture."""
    both.warm_up()
    for model in (both.pipeline, both.loop):
        weight = next(model.parameters())
        weight.data = weight.data * 2 + 1
    both.train(0, 1, 2)
    both.expect_counts(2, 5)


def two_forwards_in_flight(both: PipelineAndLoop) -> None:
    """The second forward runs before the first backward, so one of two forwards is replayed."""
    both.warm_up()

    def do(model: Model, _: nn.Module) -> object:
        first, second = model(both.input(1)), model(both.input(2))
        first.square().mean().backward()
        second.mean().backward()
        return [first.detach(), second.detach()]

    for _ in range(2):
        both.run_both(do)
    both.train(3)
    both.expect_counts(4, 5)


def backward_twice(both: PipelineAndLoop) -> None:
    both.warm_up()

    def do(model: Model, _: nn.Module) -> object:
        x = both.input(1)
        y = model(x)
        y.square().mean().backward(retain_graph=True)
        y.sigmoid().mean().backward()
        return [x.grad]

    for _ in range(2):
        both.run_both(do)
    both.expect_counts(2, 4)


def other_gradient_layouts(both: PipelineAndLoop) -> None:
    """Output gradients in another layout run uncaptured at first, and then get own graphs."""
    both.warm_up()
    losses: list[Model] = [Tensor.sum, lambda y: y.t().contiguous().square().sum()]
    for loss in [loss for loss in losses * 2 for _ in range(5)]:

        def do(model: Model, _: nn.Module, loss: Model = loss) -> object:
            x = both.input(1)
            loss(model(x)).backward()
            return [x.grad]

        both.run_both(do)
    captured = [r.forward and r.backward for r in both.reports()]
    both.expect("each of three layouts has its graphs", captured == [True] * 3)


def inference(both: PipelineAndLoop) -> None:
    """Later replays do not overwrite returned outputs."""

    def do(model: Model, module: nn.Module) -> object:
        module.eval()
        with torch.no_grad():
            return [model(both.input(seed)) for seed in range(5)]

    both.run_both(do)
    report = both.expect_counts(2, 3)
    both.expect("the forward is captured alone", report.forward and not report.backward)


def kept_gradients(both: PipelineAndLoop) -> None:
    """Later steps do not overwrite the gradients of earlier steps."""
    both.warm_up()

    def do(model: Model, module: nn.Module) -> object:
        kept = []
        for seed in range(3):
            train_step(model, both.input(seed))
            kept += [parameter.grad for parameter in module.parameters()]
            module.zero_grad()
        for seed in range(2):  # accumulates into existing gradients
            train_step(model, both.input(seed))
        return kept

    both.run_both(do)


def cannot_be_captured(both: PipelineAndLoop, obstacle: str) -> None:
    """Steps run uncaptured, and the report says why."""
    both.warm_up()
    both.train(5)
    report = both.expect_counts(5, 0)
    both.expect(f"the obstacle is known: {report.obstacle}", re.search(obstacle, report.obstacle))
    both.expect("no graph is left", not report.forward)
    both.expect("the report has the obstacle", report.obstacle in doctor(both.pipeline))


def capture_turned_off(both: PipelineAndLoop) -> None:
    """Capture is turned off between a forward and its backward."""
    both.warm_up()

    def do(model: Model, module: nn.Module) -> object:
        y = model(both.input(1))
        both.pipeline.capture = False
        y.square().mean().backward()
        return [y.detach()]

    both.run_both(do)
    both.train(2)
    both.expect("no graph is left", both.reports() == [])
    both.pipeline.capture = True
    both.warm_up()
    both.expect_counts(2, 3)


def num_captures() -> int:
    return int(ctypes.CDLL(None).fake_cuda_num_captures())


def num_timed_events() -> int:
    return int(ctypes.CDLL(None).fake_cuda_num_timed_events())


def more_shapes_than_places(both: PipelineAndLoop) -> None:
    """Eight of ten random shapes are captured, once each; the shape of a later phase takes over a place."""
    before, chosen = num_captures(), random.Random(0)
    for _ in range(100):
        samples = chosen.randrange(CHUNKS // 2, CHUNKS // 2 + 10)
        both.infer(samples, samples)
    captures = num_captures() - before
    both.expect(f"eight of ten shapes are captured, got {captures} captures", captures == 8)
    both.expect(f"most mini-batches are replayed, got {both.replays()}", both.replays() > 50)
    before = num_captures()
    for _ in range(12):
        both.infer(BATCH, BATCH)
    captures = num_captures() - before
    both.expect(f"the only shape of a later phase is captured, got {captures} captures", captures == 1)


def several_threads(both: PipelineAndLoop) -> None:
    """Each thread uses an own stream."""
    both.warm_up()
    for seed in range(4):

        def run(seed: int = seed) -> None:
            with caller_streams(both.devices[:1]):
                both.train(seed)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()


def changed_settings(both: PipelineAndLoop) -> None:
    """A step under new settings uses another plan, or warms up again, and is captured again."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    both.warm_up()
    both.train(4)
    for where, name, value in (
        (matmul, "fp32_precision", "tf32"),
        (cudnn, "deterministic", True),
        (None, "attention", True),
    ):
        replays = both.replays()
        setattr(where, name, value) if where else torch.backends.cuda.enable_flash_sdp(value)
        both.train(5, 6)
        both.expect(f"{name}: replayed at once", both.replays() == replays)
        both.train(7)
        both.expect(f"{name}: not captured again", both.replays() == replays + 1)


def inference_before_a_backward(both: PipelineAndLoop) -> None:
    """Inference runs between a forward and its backward, as with a teacher network."""
    for seed in range(4):
        both.infer(seed, HALF)
    both.warm_up()

    def do(model: Model, _: nn.Module) -> object:
        y = model(both.input(5))
        with torch.no_grad():
            other = model(both.input(6)[:HALF])
        y.square().mean().backward()
        return [y.detach(), other]

    for _ in range(3):
        both.run_both(do)
    both.expect("both are captured", sorted(r.backward for r in both.reports()) == [False, True])


def two_shapes_in_flight(both: PipelineAndLoop, first_captured: int) -> None:
    """The forwards of two shapes run first, then their backwards in either order."""
    sizes = {BATCH: HALF, HALF: BATCH}
    both.warm_up(first_captured)
    both.warm_up(sizes[first_captured])
    for samples, first in ((samples, first) for samples in sizes for first in (0, 1)):

        def do(model: Model, _: nn.Module, samples: int = samples, first: int = first) -> object:
            outputs = [model(both.input(1)[:samples]), model(both.input(2)[: sizes[samples]])]
            outputs[first].square().mean().backward()
            outputs[1 - first].square().mean().backward()
            return [y.detach() for y in outputs]

        both.run_both(do)
    for samples in sizes:
        both.train(3, samples=samples)


def captures_of_other_plans_in_flight(both: PipelineAndLoop) -> None:
    """Another shape reaches its capture between a forward and its backward, also after graphs were freed."""
    both.warm_up()
    for freed in (False, False, True, True):

        def do(model: Model, _: nn.Module, freed: bool = freed) -> object:
            y = model(both.input(7))
            if freed:
                pipeline_of(both.pipeline).forget_graphs()
            for seed in range(5):
                train_step(model, both.input(seed), HALF)
            y.square().mean().backward()
            return [y.detach()]

        both.run_both(do)
    both.warm_up()


def kept_output_blocks_replays(both: PipelineAndLoop) -> None:
    """An output whose backward is pending blocks replays of all other plans, which share its memory."""
    for samples in (BATCH, HALF):
        both.warm_up(samples)
    kept = both.pipeline(both.input(1))
    before = both.replays()
    both.train(2, samples=HALF)
    both.expect("the other plan runs uncaptured", both.replays() == before)
    del kept
    both.train(2, samples=HALF)
    both.train(2)
    both.expect("both are replayed again", both.replays() == before + 2)


def replicated_gradient(both: PipelineAndLoop) -> None:
    """Checks the gradient of an input that is replicated to every micro-batch; here there is one."""

    class Scaled(nn.Linear):
        def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
            x, scale = inputs
            return super().forward(x) * scale

    device = both.devices[0]
    model = nn.Sequential(Scaled(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.GELU()).to(device)
    pipe = GPipe(copied(model), [2, 2], devices=[device] * 2, chunks=1, capture=True)
    kept, expected = [], []
    for seed in range(6):
        torch.manual_seed(seed)
        x, scale = torch.randn(BATCH, WIDTH).to(device), torch.randn(WIDTH).to(device).requires_grad_()
        kept += torch.autograd.grad(pipe((x, replicate(scale))).square().mean(), [scale])
        expected += torch.autograd.grad(model((x, scale)).square().mean(), [scale])
    both.compare("gradients", kept, expected)
    both.expect("steps are replayed", any(r.replays > 2 for r in pipeline_of(pipe).graph_reports()))


def eight_stages_on_one_device(both: PipelineAndLoop) -> None:
    """Five streams per stage make 40, more than a pool has."""
    for transport in ("auto", "peer", "pinned"):
        eight = PipelineAndLoop(["cuda:0"] * 8, "never", [1] * 8, transport=transport)
        eight.train(*range(5))
        eight.expect_counts(2, 3)
        both.differences += eight.differences


def a_second_thread_on_pool_streams(both: PipelineAndLoop) -> None:
    """Another thread adds numbers on every stream of a device's pool during captures on that device."""
    done, wrong = threading.Event(), list[object]()

    def add() -> None:
        try:
            streams = [torch.cuda.Stream("cuda:0") for _ in range(POOL_SIZE)]
            sums, count = torch.zeros(POOL_SIZE, device="cuda:0"), 0
            torch.cuda.synchronize("cuda:0")
            while not done.is_set():
                for place, stream in enumerate(streams):
                    with torch.cuda.stream(stream):
                        sums[place].add_(1)
                count += 1
            torch.cuda.synchronize("cuda:0")
            wrong.extend([] if sums.eq(count).all() else [(sums, count)])
        except RuntimeError as error:
            wrong.append(error)

    thread = threading.Thread(target=add)
    thread.start()
    try:
        both.train(*range(5))
    finally:
        done.set()
        thread.join()
    both.expect(f"the thread: {wrong}", not wrong)
    both.expect_counts(2, 3)


def streams_of_one_device_warn_of_nothing(both: PipelineAndLoop) -> None:
    """The caller has an own stream on the last stage's device only."""
    with warnings.catch_warnings(record=True) as found, caller_streams(both.devices[-1:]):
        warnings.simplefilter("always")
        train_step(both.pipeline, both.input(0))
    both.expect(f"{found}", not [each for each in found if "AccumulateGrad" in str(each.message)])


def forward_cannot_be_captured(both: PipelineAndLoop) -> None:
    cannot_be_captured(both, r"^in action 0F0: stage 0, layer 1 \(GELU\), micro-batch 0: .*captur")


def backward_cannot_be_captured(both: PipelineAndLoop) -> None:
    cannot_be_captured(both, "captur")


def allocator_cannot_capture(both: PipelineAndLoop) -> None:
    cannot_be_captured(both, "allocator")


def captured_only_where_it_pays(both: PipelineAndLoop) -> None:
    """With slow devices nothing is captured unless asked; with fast ones, as soon as the plan is warm."""
    slow = float(os.environ["FAKE_CUDA_ELAPSED"]) > 0
    both.train(0, 1)
    both.expect("no run is timed if all are to be captured", num_timed_events() == 0)
    both.pipeline.capture = "auto"
    both.train(*range(6))
    report = both.expect_counts(8, 0) if slow else both.expect_counts(3, 5)
    both.expect("forward and backward are timed", num_timed_events() == (24 if slow else 4))
    why = "the device takes longer than the launches"
    both.expect("the report says why", (why in doctor(both.pipeline)) is slow)
    both.expect("it is no obstacle", not report.obstacle)
    both.pipeline.capture = True
    both.train(*range(3))
    both.expect("it is captured if asked", both.replays() >= 3)


def two_shapes_in_flight_the_longer_first(both: PipelineAndLoop) -> None:
    two_shapes_in_flight(both, BATCH)


def two_shapes_in_flight_the_shorter_first(both: PipelineAndLoop) -> None:
    two_shapes_in_flight(both, HALF)


def main() -> None:
    operators, cases, devices, *checkpoint = sys.argv[1:]
    load(operators)
    for case in cases.split("/"):
        torch.manual_seed(0)
        mark("plan")
        both = PipelineAndLoop(devices.split(","), *checkpoint)
        globals()[case](both)
        print(f"{case}: {'; '.join(both.differences) or 'equal'}", flush=True)


if __name__ == "__main__":
    main()

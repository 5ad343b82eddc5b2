"""Reports on steps whose times are known, advice on planted problems, and what recording costs.

Stages that sleep {FORWARD} s in the forward of a micro-batch, and twice as long in its backward;
{MICROBATCHES} micro-batches, fill-drain. What is known follows from the rules of the schedule.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.measure import Ratio, Table, report, samples, timing
from bench.models.gpt import blocks
from gpipe_fast import GPipe
from gpipe_fast.recording import Report
from gpipe_fast.schedule import simulate

WIDTH = 4
MICROBATCHES, FORWARD = 8, (0.1, 0.2, 0.1)
STEPS, ROUNDS = 10, 60


@functools.cache
def _define_sleep() -> None:
    """Defines an operator that sleeps and returns a copy of its input."""

    @torch.library.custom_op("gpipe_fast_bench::sleep", mutates_args=())
    def sleep(x: Tensor, seconds: float, each: float) -> Tensor:
        time.sleep(seconds + each * len(x))
        return x.clone()

    sleep.register_fake(lambda x, seconds, each: torch.empty_like(x))


class Sleep(torch.autograd.Function):
    """Sleeps for a constant and a part for each sample, and twice as long in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, each: float) -> Tensor:
        ctx.times = 2 * seconds, 2 * each
        found: Tensor = torch.ops.gpipe_fast_bench.sleep(x, seconds, each)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return torch.ops.gpipe_fast_bench.sleep(gradients[0], *ctx.times), None, None


class Sleeper(nn.Module):
    """A layer that sleeps."""

    def __init__(self, seconds: float, each: float = 0.0) -> None:
        super().__init__()
        self.seconds, self.each = seconds, each
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Sleep.apply(x + self.weight, self.seconds, self.each)
        return found


class BusyInPython(nn.Module):
    """A layer that runs in Python, because it looks at a value, and computes there for a while."""

    def __init__(self, seconds: float, width: int) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e30:
            return x
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass
        return x + self.weight


def model_of(layers: Sequence[nn.Module], balance: list[int], chunks: int, **options: Any) -> GPipe:
    """Returns a pipeline of zb-h1 that keeps all activations, unless an option says otherwise."""
    settings: dict[str, Any] = {
        "schedule": "zb-h1",
        "checkpoint": "never",
        "devices": ["cpu"] * len(balance),
        **options,
    }
    return GPipe(nn.Sequential(*layers), balance, chunks=chunks, **settings)


def report_of(model: GPipe, batch: int, **options: Any) -> Report:
    """Returns a report on steps of a mini-batch."""
    x = torch.ones(batch, WIDTH)
    return model.report(x, target=torch.zeros(batch, WIDTH), loss_fn=F.mse_loss, **options)


def known_rows() -> list[list[str]]:
    """Returns what a report says of sleeping stages beside what is known."""
    model = model_of([Sleeper(s) for s in FORWARD], [1, 1, 1], MICROBATCHES, schedule="gpipe")
    found = report_of(model, 8)
    times: dict[str, Any] = {"forward": FORWARD, "backward": [2 * s for s in FORWARD], "weights": 0}
    known = simulate("gpipe", 3, MICROBATCHES, checkpoint="never", **times)
    equal = 3 * (sum(FORWARD) / 3) * (MICROBATCHES + 2)  # forward and backward of equal stages
    idle = 3 * known.time - sum(known.busy)
    imbalance = 3 * (known.time - equal) / idle
    rows: list[tuple[str, float, float]] = [("step ms", known.time * 1e3, found.step * 1e3)]
    rows += [
        (f"busy ms of stage {i}", a * 1e3, b.busy * 1e3)
        for i, (a, b) in enumerate(zip(known.busy, found.stages, strict=True))
    ]
    rows += [
        (f"not busy ms of stage {i}", (known.time - a) * 1e3, (b.waiting + b.idle + b.copying) * 1e3)
        for i, (a, b) in enumerate(zip(known.busy, found.stages, strict=True))
    ]
    rows += [
        ("critical path ms", known.time * 1e3, found.path_seconds * 1e3),
        ("imbalance %", 100 * imbalance, 100 * found.blame["imbalance"]),
        ("fill and drain %", 100 * (1 - imbalance), 100 * found.blame["fill and drain"]),
    ]
    return [[name, f"{a:.2f}", f"{b:.2f}", f"{b / a:.3f}"] for name, a, b in rows]


def problems() -> dict[str, Callable[[], tuple[Report, str, float]]]:
    """Returns functions that plant problems: a report, the change of its advice, and the step without it."""

    def settings(model: GPipe, batch: int, *names: str) -> tuple[Report, str, float]:
        found = report_of(model, batch)
        advice = next((each for each in found.advice if {*names} & set(each.settings)), None)
        if advice is None:
            return found, "none", float("nan")
        for name, value in advice.settings.items():
            setattr(model, name, value)
        return found, advice.code, report_of(model, batch).step

    def sleepers(count: int, seconds: float, each: float = 0.0) -> list[nn.Module]:
        return [Sleeper(seconds, each) for _ in range(count)]

    def in_python() -> tuple[Report, str, float]:
        def model(seconds: float) -> GPipe:
            first, second = blocks(2, 128, 4)
            return model_of([first, BusyInPython(seconds, 128), second], [1, 2], 8)

        x, y = torch.randn(16, 64, 128), torch.randn(16, 64, 128)
        found = model(0.01).report(x, target=y, loss_fn=F.mse_loss)
        named = next((each.what for each in found.advice if not each.settings), "none")
        return found, named, model(0.0).report(x, target=y, loss_fn=F.mse_loss).step

    def threads() -> tuple[Report, str, float]:
        model = model_of(blocks(4, 128, 4), [2, 2], 8)
        model.threads_per_stage = 8
        x, y = torch.randn(16, 64, 128), torch.randn(16, 64, 128)
        found = model.report(x, target=y, loss_fn=F.mse_loss)
        advice = next((each for each in found.advice if "threads_per_stage" in each.settings), None)
        if advice is None:
            return found, "none", float("nan")
        model.threads_per_stage = advice.settings["threads_per_stage"]
        return found, advice.code, model.report(x, target=y, loss_fn=F.mse_loss).step

    return {
        "a slow stage": lambda: settings(model_of(sleepers(6, 0.02), [1, 1, 4], 8), 8, "balance"),
        "too few micro-batches": lambda: settings(
            model_of(sleepers(4, 0.005, 0.01), [1] * 4, 2), 32, "chunks"
        ),
        "too many micro-batches": lambda: settings(
            model_of(sleepers(2, 0.01, 0.001), [1] * 2, 32), 32, "chunks"
        ),
        "needless recompute": lambda: settings(
            model_of(sleepers(3, 0.04), [1] * 3, 8, checkpoint="always"), 8, "checkpoint"
        ),
        "too many threads": threads,
        "a layer in Python": in_python,
    }


def planted_rows() -> list[list[str]]:
    """Returns, for each planted problem, the predicted step beside the step without the problem."""
    rows = []
    for name, plant in problems().items():
        found, change, gained = plant()
        advice = next((a for a in found.advice if change in (a.code, a.what)), None)
        predicted = float("nan") if advice is None else advice.predicted
        place = "" if advice is None else str(found.advice.index(advice) + 1)
        times = [f"{s * 1e3:.1f}" for s in (found.step, predicted, gained)]
        rows.append([name, change, place, *times, f"{(found.step - predicted) / (found.step - gained):.2f}"])
    return rows


def recording_rows() -> list[list[str]]:
    """Returns the time of steps with and without a recording."""
    model = model_of(blocks(2, 64, 2), [1, 1], 4, checkpoint="except_last")
    model.threads_per_stage = 1
    x = torch.randn(20, 64, 64)

    def steps() -> None:
        for _ in range(STEPS):
            model(x).sum().backward()

    def recorded() -> None:
        model._pipeline.record(65536)
        try:
            steps()
        finally:
            model._pipeline.record(0)

    steps()
    found = samples({"without": steps, "with": recorded}, ROUNDS)
    ratio = Ratio.of(found["with"], found["without"])
    rows = [[f"{name} a recording", timing([t / STEPS for t in times]).ms()] for name, times in found.items()]
    return [*rows, ["ratio", str(ratio)]]


def main() -> None:
    """Runs the benchmark, and writes its results."""
    torch.set_num_threads(1)
    _define_sleep()
    report(
        globals(),
        ["figure", "known", "reported", "ratio"],
        known_rows(),
        more_tables=[
            Table(
                "Advice on planted problems",
                ["problem", "advice", "place", "step ms", "predicted ms", "then ms", "predicted / gained"],
                planted_rows(),
                "Sleeping layers, but for the last two rows. The last column is the predicted gain over the "
                "gain that was measured once the advice was followed; for the layer in Python, once the time "
                "that it spends there is gone. A slow link is planted on the fake CUDA runtime, in "
                "tests/fake_cuda/test_recording.py.",
            ),
            Table(
                "The cost of recording",
                ["step", "ms"],
                recording_rows(),
                f"Two stages of one GPT block each, {STEPS} steps in a sample; medians with the 20th and "
                "80th percentile, and the ratio with its 95% interval.",
            ),
        ],
    )

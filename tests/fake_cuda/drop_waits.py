"""Leaves out the stream waits of one call site of csrc/ at a time, on the fake runtime with deferred work.

`drop_waits.py OPERATORS SCENARIO SEEDS [SITE...]`: runs a scenario, then runs it again without the waits of
each SITE (default: every call site that the scenario reached), in the random orders of up to SEEDS seeds.
Prints for each site the number of seeds until a symptom occurred (0: never), and the symptom. If SEEDS is 0,
the scenario runs twice, for its log.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.fake_cuda.train_models import batch_of, layers_of
from tests.internals import inject_failure, pipeline_of, remove_faults

RUNTIME = ctypes.CDLL(None)
FOUR_DEVICES, ONE_DEVICE = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"], ["cuda:1"] * 4
BASELINE_SEEDS = 3  # random orders in which no wait is left out


def synchronize() -> None:
    for device in range(4):
        torch.cuda.synchronize(device)


class Scenario:
    """Steps of a pipeline whose caller uses own streams, and overwrites a step's inputs right after it."""

    trains = True

    def __init__(
        self, model: str, devices: list[str], *, chunks: int = 4, steps: int = 3, **keywords: object
    ) -> None:
        torch.manual_seed(0)
        self.failing_action = keywords.pop("failing_action", None)
        self.accumulates = keywords.pop("accumulates", False)
        self.captured = keywords.setdefault("capture", False)
        self.steps, self.count = steps, 0
        self.devices = devices
        self.pipeline = GPipe(
            nn.Sequential(*layers_of(model)), [2] * 4, devices=devices, chunks=chunks, **keywords
        )
        self.x = batch_of(model).to(devices[0]).requires_grad_()
        self.inputs = [self.x, *self.pipeline.parameters(), *self.pipeline.buffers()]
        self.initial_values = [tensor.detach().cpu().clone() for tensor in self.inputs]
        # Gradient accumulators belong to the streams that are current here: the default streams.
        self.accumulators = [p.expand_as(p).grad_fn.next_functions[0][0] for p in self.pipeline.parameters()]
        self.streams = [torch.cuda.Stream(device) for device in sorted({*devices} - {"cpu"})]

    def run(self) -> list[Tensor]:
        """Returns all results and the final parameters, buffers and inputs, on the CPU."""
        with contextlib.ExitStack() as stack, torch.no_grad():
            for stream in self.streams:
                stack.enter_context(torch.cuda.stream(stream))
            for tensor, value in zip(self.inputs, self.initial_values, strict=True):
                tensor.copy_(value)
                tensor.grad = None
            synchronize()
            if self.captured:
                self.pipeline.capture = False  # frees the graphs, so that they are captured again
                self.pipeline.capture = True
            self.count = 0
            found = [each for _ in range(self.steps) for each in self.step()]
            self.synchronize_callers()
            return [tensor.cpu().clone() for tensor in [*found, *self.inputs]]

    def synchronize_callers(self) -> None:
        """Waits for caller streams other than the current ones; there are none here."""

    def step(self) -> list[Tensor]:
        torch.manual_seed(1)
        if self.failing_action is not None:
            self.run_failing_step()
        with torch.enable_grad():
            y = self.pipeline(self.x)
            loss = y.square().sum()
            if self.accumulates:  # autograd's threads add to existing gradients
                loss.backward(retain_graph=True)
            loss.backward()
        trained = [self.x, *self.pipeline.parameters()]
        found = [y.detach(), *(t.grad.clone() for t in trained if t.grad is not None)]
        for tensor in trained:
            if tensor.grad is not None:
                tensor.add_(tensor.grad, alpha=-0.01)
                tensor.grad.fill_(float("nan"))
            tensor.grad = None
        return found

    def run_failing_step(self) -> None:
        """Runs a step in which an action fails; the caller then overwrites tensors that it may have sent."""
        inject_failure(self.pipeline, self.failing_action, after=1)
        x = (2 * self.x).detach().requires_grad_()
        with torch.enable_grad(), contextlib.suppress(ValueError):
            self.pipeline(x).sum().backward()
        remove_faults(self.pipeline)

    def is_captured(self) -> bool:
        """Returns whether every plan that ran often enough is captured; true if capture is off."""
        reports = pipeline_of(self.pipeline).graph_reports() if self.captured else ()
        return all(r.forward and (r.backward or not self.trains) for r in reports if r.uncaptured > 1)


class AlternatingCallers(Scenario):
    """Two alternating callers, each with own streams and an own input; every third mini-batch is smaller."""

    def __init__(self, *args: object, trains: bool = True, **keywords: object) -> None:
        self.trains = trains
        super().__init__(*args, **keywords)
        self.xs = [self.x, (2 * self.x).detach().requires_grad_()]
        self.inputs.append(self.xs[1])
        self.initial_values.append(self.xs[1].detach().cpu().clone())
        self.other_streams = [torch.cuda.Stream(stream.device) for stream in self.streams]
        self.count = 0

    def synchronize_callers(self) -> None:
        """Synchronizes the streams of both callers, in reverse order."""
        for stream in reversed([*self.streams, *self.other_streams]):
            stream.synchronize()

    def step(self) -> list[Tensor]:
        self.count += 1
        turn = self.count % 2
        with contextlib.ExitStack() as stack:
            for stream in (self.streams, self.other_streams)[turn]:
                stack.enter_context(torch.cuda.stream(stream))
            x = self.xs[turn]
            with torch.enable_grad():
                part = x if self.count % 3 else x[::2]
            if not self.trains:
                found = [self.pipeline(part).tanh()]
                x.add_(0.1)
                return found
            with torch.enable_grad():
                y = self.pipeline(part)
                (gradient,) = torch.autograd.grad(y.square().sum(), x)
            found = [y.tanh(), gradient.clone()]
            x.add_(gradient, alpha=-0.01)
            return found


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "hand over": lambda: Scenario("mlp", ONE_DEVICE, checkpoint="except_last"),
    "peer": lambda: Scenario("skips", FOUR_DEVICES, checkpoint="except_last", transport="peer"),
    "small": lambda: Scenario("small", FOUR_DEVICES, checkpoint="never", transport="peer"),
    "pinned": lambda: Scenario(
        "large", FOUR_DEVICES, chunks=2, steps=2, checkpoint="never", transport="pinned"
    ),
    "no peers": lambda: Scenario("skips", FOUR_DEVICES, checkpoint="always", transport="pinned"),
    "python": lambda: Scenario("beside", FOUR_DEVICES, checkpoint="except_last"),
    "tied": lambda: Scenario("tied", FOUR_DEVICES, checkpoint="except_last"),
    "mixed": lambda: Scenario("skips", ["cuda:0", "cpu", "cuda:0", "cuda:1"], checkpoint="never"),
    "accumulates": lambda: Scenario("mlp", FOUR_DEVICES, checkpoint="never", accumulates=True),
    "fails": lambda: Scenario(
        "skips", FOUR_DEVICES, checkpoint="never", transport="peer", failing_action="1F2"
    ),
    "captured": lambda: Scenario("dropout", FOUR_DEVICES, steps=4, checkpoint="except_last", capture=True),
    "captured skips": lambda: Scenario("skips", FOUR_DEVICES, steps=4, checkpoint="never", capture=True),
    "captured pinned": lambda: Scenario(
        "skips", FOUR_DEVICES, steps=4, checkpoint="never", transport="pinned", capture=True
    ),
    "captured, in turn": lambda: AlternatingCallers(
        "mlp", FOUR_DEVICES, steps=11, checkpoint="never", capture=True
    ),
    "captured, inference in turn": lambda: AlternatingCallers(
        "mlp", FOUR_DEVICES, steps=11, checkpoint="never", capture=True, trains=False
    ),
    "captured, one device": lambda: Scenario("mlp", ONE_DEVICE, steps=4, checkpoint="always", capture=True),
}


def symptom_of(scenario: Scenario, expected: list[Tensor]) -> str:
    """Runs the scenario, and returns how it went wrong; empty if it did not."""
    try:
        found = scenario.run()
    except Exception as error:
        return f"raises {type(error).__name__}"
    if not all(map(torch.equal, found, expected)):
        return "wrong bits"
    return "" if scenario.is_captured() else "not captured"


def try_sites(name: str, seeds: int, chosen: list[int]) -> None:
    scenario = SCENARIOS[name]()
    RUNTIME.fake_cuda_reseed(0)
    expected = scenario.run()
    for seed in range(BASELINE_SEEDS):
        RUNTIME.fake_cuda_reseed(seed)
        assert symptom_of(scenario, expected) == "", name
    sites = [int(line, 16) for line in Path(os.environ["FAKE_CUDA_SITES"]).read_text().split()]
    for site in chosen or sites:
        symptom = ""
        for seed in range(seeds):
            RUNTIME.fake_cuda_drop_waits(ctypes.c_ulong(site))
            RUNTIME.fake_cuda_reseed(seed)
            symptom = symptom_of(scenario, expected)
            RUNTIME.fake_cuda_drop_waits(ctypes.c_ulong(0))
            if symptom:
                break
        print(f"{site:x}\t{seed + 1 if symptom else 0}\t{symptom}", flush=True)
        if symptom.startswith("raises"):
            scenario = SCENARIOS[name]()
        synchronize()


def main() -> None:
    operators, scenario, seeds, *sites = sys.argv[1:]
    torch.ops.load_library(operators)
    torch.backends.cudnn.enabled = False
    torch.set_num_threads(1)
    if int(seeds) == 0:
        baseline = SCENARIOS[scenario]()
        for _ in range(2):  # some waits only occur after an earlier run
            baseline.run()
    else:
        try_sites(scenario, int(seeds), [int(site, 16) for site in sites])


if __name__ == "__main__":
    main()

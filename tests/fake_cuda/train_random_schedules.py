"""Trains pipelines in random schedules on fake devices; run with the fake runtime preloaded.

`train_random_schedules.py OPERATORS FIRST COUNT [WORD...]`: runs COUNT cases, beginning with case FIRST. A
case is a step in a random schedule, with random delays; outputs, gradients and buffers are compared bit for
bit with the plain loop on the CPU. Consecutive cases share a setup (model, balance, devices, caller's
streams), so that stages are traced once; between steps the caller overwrites everything that the steps read.
Prints the differences, or "equal"; with ``times`` also the time per case; with ``faulty`` it injects runtime
faults.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, keyed_rng
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.schedule import Kind, Schedule
from tests.fake_cuda.random_schedule import order_of, random_schedule
from tests.fake_cuda.train_models import BATCH, batch_of, layers_of
from tests.internals import inject_delays, inject_failure, remove_faults, use_schedule

MODELS = ("mlp", "skips", "several", "batch norm", "dropout", "tied", "python", "convolutions")
MODELS += ("convolutions, channels last",)
LAYERS = 8
CASES_PER_SETUP = 50
MAX_MICROBATCHES = 8
MICROBATCH_SIZE = BATCH // MAX_MICROBATCHES  # samples
NUM_VALUE_SETS = 2  # sets of parameters and inputs; consecutive steps use different ones
MAX_DELAY_US = 100

# The second of every three cases gets one of these faults (runtime/faults.h), in a random call.
FAULTS = ("dropped", "host_wait", "stale", "misplaced", "early")

RUNTIME = ctypes.CDLL(None)


def mark(text: str) -> None:
    RUNTIME.fake_cuda_mark(text.encode())


def plant_fault(generator: random.Random, number: int) -> None:
    kind = FAULTS[number // 3 % len(FAULTS)] if number % 3 == 1 else ""
    which = generator.randrange(4) if kind == "misplaced" else generator.randrange(16)
    RUNTIME.fake_cuda_plant(f"{kind} {which}".encode() if kind not in ("", "early") else kind.encode())


@dataclass
class StepValues:
    """One set of values that a step reads, and the plain loop's results for each micro-batch."""

    seed: int
    state: dict[str, Tensor]  # parameters and buffers
    x: Tensor
    weight: Tensor  # gradient of the outputs
    outputs: list[Tensor]
    input_gradients: list[Tensor]
    gradients: dict[str, list[Tensor]]
    batch_norm_inputs: dict[str, list[Tensor]]  # by name of the batch norm


def plain_loop(layers: nn.Sequential, x: Tensor, seed: int) -> StepValues:
    """Runs each micro-batch alone, since the schedule decides in which order a stage adds gradients."""
    norms = {
        name: layer
        for name, layer in layers.named_modules()
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)
    }
    found = StepValues(
        seed, copy.deepcopy(layers.state_dict()), x, Tensor(), [], [], {}, {name: [] for name in norms}
    )
    with contextlib.ExitStack() as stack:
        for name, layer in norms.items():
            inputs = found.batch_norm_inputs[name]
            hook = layer.register_forward_pre_hook(
                lambda _, args, inputs=inputs: inputs.append(args[0].detach())
            )
            stack.callback(hook.remove)
        torch.manual_seed(seed)
        leaves = [part.detach().requires_grad_() for part in x.split(MICROBATCH_SIZE)]
        with keyed_rng(layers):
            outputs = [layers(part) for part in leaves]
    found.weight = torch.randn(torch.cat(outputs).shape)
    named = dict(layers.named_parameters())
    for leaf, y, weight in zip(leaves, outputs, found.weight.split(MICROBATCH_SIZE), strict=True):
        own, *gradients = torch.autograd.grad(y, [leaf, *named.values()], weight)
        found.outputs.append(y.detach())
        found.input_gradients.append(own)
        for name, gradient in zip(named, gradients, strict=True):
            found.gradients.setdefault(name, []).append(gradient)
    return found


@cache
def values_of(model: str) -> tuple[nn.Sequential, list[StepValues]]:
    """Returns a model on the CPU, and its sets of values."""
    torch.manual_seed(MODELS.index(model))
    layers = nn.Sequential(*layers_of(model))
    if model.endswith("channels last"):
        layers.to(memory_format=torch.channels_last)
    sets = []
    for seed in range(NUM_VALUE_SETS):
        x = batch_of(model)
        with torch.no_grad():
            for tensor in layers.parameters():
                tensor.copy_(torch.randn_like(tensor) * 0.3)
        before = copy.deepcopy(layers.state_dict())
        sets.append(plain_loop(layers, x, seed))
        sets[-1].state = before
    return layers, sets


class Setup:
    """A pipeline on random devices."""

    def __init__(self, model: str, generator: random.Random) -> None:
        self.model = model
        layers, self.values = values_of(model)
        num_stages = generator.randint(1, 4)
        cuts = sorted(generator.sample(range(1, LAYERS), num_stages - 1))
        self.balance = [end - begin for begin, end in zip([0, *cuts], [*cuts, LAYERS], strict=True)]
        gpus = [f"cuda:{i}" for i in range(generator.choice((1, 2, 4, 4)))]
        self.devices = [generator.choice([*gpus, *gpus, "cpu"]) for _ in self.balance]
        self.pipeline = GPipe(copy.deepcopy(layers), self.balance, devices=self.devices)
        # On the devices: the values to restore, the inputs, and the gradients of the outputs.
        self.sources = [
            {name: v.state[name].to(t.device) for name, t in self.pipeline.state_dict().items()}
            for v in self.values
        ]
        self.xs = [v.x.to(self.devices[0]) for v in self.values]
        self.weights = [v.weight.to(self.devices[-1]) for v in self.values]
        self.x = self.xs[0].clone()  # with the same strides
        self.own_streams = generator.random() < 0.5
        # The caller's streams must not run before the tensors above are complete.
        for device in {device for device in self.devices if device != "cpu"}:
            torch.cuda.synchronize(device)
        self.may_wait = "cpu" in self.devices or model == "python"

    def __str__(self) -> str:
        caller = ", caller on own streams" if self.own_streams else ""
        return f"{self.model}, {self.balance} on {','.join(self.devices)}{caller}"

    def caller_streams(self) -> contextlib.ExitStack:
        """Enters the caller's streams."""
        stack = contextlib.ExitStack()
        for device in sorted(
            {device for device in self.devices if device != "cpu"} if self.own_streams else ()
        ):
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
        return stack

    @torch.no_grad()
    def overwrite(self, which: int) -> None:
        """Overwrites everything that a step has read with the set of values `which`."""
        for name, tensor in self.pipeline.state_dict().items():
            tensor.copy_(self.sources[which][name], non_blocking=True)
        self.x.copy_(self.xs[which])

    def stage_of(self, name: str) -> int:
        """Returns the index of the stage that has this parameter or buffer."""
        layer = int(name.split(".")[0])
        return next(i for i in range(len(self.balance)) if layer < sum(self.balance[: i + 1]))


@dataclass
class StepResult:
    """The outputs, gradients and buffers of a step."""

    values: StepValues
    schedule: Schedule
    found: dict[str, Tensor]

    def differences(self, setup: Setup) -> list[str]:
        """Returns the names of the tensors that differ from the plain loop."""
        expected = dict(self._expected(setup))
        assert expected.keys() == self.found.keys(), expected.keys() ^ self.found.keys()
        found = {name: tensor.cpu() for name, tensor in self.found.items()}
        return [
            name
            for name in expected
            if not _equal(found[name], expected[name], exact=self._is_exact(setup, name))
        ]

    @staticmethod
    def _is_exact(setup: Setup, name: str) -> bool:
        """Returns whether bits must be equal: a shared parameter's gradient is added in a different order."""
        return setup.model != "tied" or name != "gradient of 0.weight"

    def _expected(self, setup: Setup) -> Iterator[tuple[str, Tensor]]:
        m = self.schedule.num_microbatches
        yield "output", torch.cat(self.values.outputs[:m])
        yield "gradient of the input", torch.cat(self.values.input_gradients[:m])
        for name, parts in self.values.gradients.items():
            order = order_of(self.schedule, setup.stage_of(name), Kind.B, Kind.W)
            total = parts[order[0]].clone()
            for i in order[1:]:
                total += parts[i]
            yield f"gradient of {name}", total
        for name, inputs in self.values.batch_norm_inputs.items():
            order = order_of(self.schedule, setup.stage_of(f"{name}."), Kind.F)
            yield from self._statistics(name, [inputs[i] for i in order])

    def _statistics(self, name: str, inputs: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields a batch norm's buffers after these inputs, in this order."""
        mean, var = (self.values.state[f"{name}.running_{what}"].clone() for what in ("mean", "var"))
        for x in inputs:
            nn.functional.batch_norm(x, mean, var, training=True)
        yield f"buffer {name}.running_mean", mean
        yield f"buffer {name}.running_var", var
        yield (
            f"buffer {name}.num_batches_tracked",
            self.values.state[f"{name}.num_batches_tracked"] + len(inputs),
        )


def _equal(a: Tensor, b: Tensor, exact: bool) -> bool:
    return torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def run_failing_step(
    setup: Setup, x: Tensor, seed: int, generator: random.Random, schedule: Schedule
) -> None:
    """Runs a step in which an action fails; frees its tensors immediately, while work may be in flight."""
    action = str(generator.choice(schedule.order()))
    inject_failure(
        setup.pipeline, action, after=generator.randint(0, 2), seed=seed, max_delay_us=MAX_DELAY_US
    )
    with pytest.raises(ValueError, match=rf"\(in action {action}\b"):
        setup.pipeline(x.detach().requires_grad_()).sum().backward()
    remove_faults(setup.pipeline)


def step(setup: Setup, number: int, generator: random.Random) -> StepResult:
    """Runs the step of a case, without synchronizing with its results."""
    pipeline, which = setup.pipeline, number % NUM_VALUE_SETS
    values = setup.values[which]
    schedule = random_schedule(generator, len(setup.balance), generator.randint(1, MAX_MICROBATCHES))
    pipeline.chunks = m = schedule.num_microbatches
    pipeline.checkpoint = generator.choice(CHECKPOINT_MODES)
    delays = generator.choice((0, MAX_DELAY_US))
    mark(f"case {number}: {setup}; {pipeline.checkpoint}; {schedule.slots} slots; delays {delays}")
    setup.overwrite(which)
    x = setup.x[: m * MICROBATCH_SIZE].detach().requires_grad_()
    if generator.random() < 0.1:
        with use_schedule(pipeline, x, schedule):
            run_failing_step(setup, x, number, generator, schedule)
        setup.overwrite(which)
    for parameter in pipeline.parameters():
        parameter.grad = None
    # Plans again after a failed step, whose gradients may have arrived in another layout.
    with use_schedule(pipeline, x, schedule):
        inject_delays(pipeline, number, delays)
        torch.manual_seed(values.seed)
        mark("begin\tmay wait" if setup.may_wait else "begin")
        y = pipeline(x)
    y.backward(setup.weights[which][: m * MICROBATCH_SIZE])
    mark("end")
    found = {"output": y.detach(), "gradient of the input": x.grad}
    found |= {f"gradient of {name}": p.grad for name, p in pipeline.named_parameters()}
    found |= {f"buffer {name}": b.clone() for name, b in pipeline.named_buffers()}
    setup.overwrite(1 - which)
    return StepResult(values, schedule, found)


def setup_of(number: int) -> tuple[Setup, Sequence[int], random.Random]:
    """Returns the setup of a case, the cases that share it, and its random generator."""
    index = number // CASES_PER_SETUP
    generator = random.Random(index)
    setup = Setup(MODELS[index % len(MODELS)], generator)
    return setup, range(index * CASES_PER_SETUP, (index + 1) * CASES_PER_SETUP), generator


def run(first: int, count: int, faulty: bool) -> list[str]:
    """Runs the cases, and returns the differences."""
    found = []
    setup, cases, caller_streams = None, range(0), contextlib.ExitStack()
    pending: dict[int, StepResult] = {}  # steps whose results are not yet compared
    for number in range(first, first + count):
        if number not in cases:
            caller_streams.close()
            mark("plan")
            setup, cases, _ = setup_of(number)
            caller_streams = setup.caller_streams()
        generator = random.Random(f"case {number}")
        if faulty:
            plant_fault(generator, number)
        pending[number] = step(setup, number, generator)
        # The host compares results, and so waits, only after some steps.
        if number + 1 in (cases.stop, first + count) or (
            number % 3 == 2 if faulty else generator.random() < 0.5
        ):
            for case, result in pending.items():
                differing = result.differences(setup)
                found += [f"case {case} ({setup}): {', '.join(differing)}"] if differing else []
            pending.clear()
    caller_streams.close()
    return found


def main() -> None:
    operators, first, count, *words = sys.argv[1:]
    torch.ops.load_library(operators)
    torch.backends.cudnn.enabled = False
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # otherwise addmm may add unrounded products to gradients
    begin = time.perf_counter()
    found = run(int(first), int(count), "faulty" in words)
    if "times" in words:
        print(f"{(time.perf_counter() - begin) / int(count) * 1e3:.1f} ms a case", file=sys.stderr)
    print("; ".join(found) or "equal")


if __name__ == "__main__":
    main()

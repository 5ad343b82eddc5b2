"""Trains pipelines on fake devices; run by test_pipelines.py with the fake runtime preloaded.

`train_models.py OPERATORS MODELS DEVICES WORD...`: loads the operators, trains MODELS (``mlp/skips/..``) in
four stages on four DEVICES (``cuda:0,cpu,..``), and compares parameters, buffers and gradients with the plain
loop on the same devices. Words: a checkpoint mode (one run for each); ``captured``: steps must be captured
and replayed as graphs; ``own_streams``: the caller uses own streams; ``failures``: workers are delayed, and
failing steps run in between; names of schedules: whole steps; ``peer`` and ``pinned``: force a
transport. Prints the differences, or "equal".
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import itertools
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, keyed_rng
from gpipe_fast.arguments import TRANSPORTS
from gpipe_fast.layers.skip import pop, skippable, stash
from gpipe_fast.schedule import SCHEDULES
from tests.internals import inject_delays, inject_failure, pipeline_of

BATCH, CHUNKS, WIDTH, STEPS = 16, 8, 12, 5
FIRST_CAPTURED = 2
MAX_DELAY_US = 1000
IN_PYTHON = {"python", "beside"}


@skippable(stash=["skip"])
class StashSkip(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        yield stash("skip", x)
        return x.tanh()


@skippable(pop=["skip"])
class PopSkip(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        skip = yield pop("skip")
        return x + skip.to(x.device)


class UnusualLayouts(nn.Module):
    """Returns non-contiguous tensors, and integers."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.t(), x[:, ::2], torch.full_like(x, 3, dtype=torch.int64)


class JoinLayouts(nn.Module):
    def forward(self, values: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        turned, half, threes = values
        return turned.t() * threes + torch.cat([half, half], -1)


class SmallTensors(nn.Module):
    """Returns several small tensors, which are coalesced into one copy, and an empty tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.t(), x[:, ::2], (2 * x).double(), x[:, :0], x > 0, x.sum(1)


class JoinSmallTensors(nn.Module):
    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        turned, half, double, nothing, positive, sums = values
        joined = turned.t() + torch.cat([half, half], -1) * positive + double.float()
        return joined + nothing.sum() + sums.unsqueeze(1)


class ThreeTensors(nn.Module):
    """Returns three tensors; not traceable."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (x.tanh() if x.sum() > 0 else x.sigmoid()), 2 * x, 3 * x


@skippable(stash=["second"])
class StashSecond(nn.Module):
    """Stashes one of three tensors; not traceable."""

    def forward(self, values: tuple[Tensor, Tensor, Tensor]) -> Iterator[object]:
        first, second, _ = values
        yield stash("second", second)
        return first if second.sum() > 0 else first.clone()


class ChangeInPlace(nn.Module):
    """Changes a tensor in place that arrived together with the stashed one; not traceable."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) if x.sum() > 0 else x.mul_(3)


@skippable(pop=["second"])
class AddStashed(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        second = yield pop("second")
        return x + second.to(x.device)


WIDE = (5 << 20) // 4  # elements: 5 MiB, half of a sample's output


class LargeOutput(nn.Module):
    """Returns a tensor larger than a ring of pinned blocks, and a small one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.repeat(1, 2 * WIDE // WIDTH + 1), x


class FoldLarge(nn.Module):
    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        large, x = values
        return large[:, :WIDTH] * large[:, -WIDTH:] + x


class TiedLinear(nn.Module):
    """Shares the weight of another layer, which may be on another device."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.weight = other.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.device))


class Branching(nn.Module):
    """Branches on the values of its input; not traceable."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() if x.sum() > 0 else x.sigmoid()


def layers_of(model: str) -> list[nn.Module]:
    """Returns the eight layers of a model: two for each of four stages."""
    linear = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    norm = nn.LayerNorm(WIDTH)
    if model == "mlp":
        return [linear[0], nn.GELU(), linear[1], norm, linear[2], nn.ReLU(), linear[3], nn.Tanh()]
    if model == "skips":
        return [StashSkip(), linear[0], linear[1], nn.GELU(), linear[2], norm, PopSkip(), linear[3]]
    if model == "several":
        return [
            linear[0],
            UnusualLayouts(),
            JoinLayouts(),
            linear[1],
            UnusualLayouts(),
            JoinLayouts(),
            linear[2],
            norm,
        ]
    if model == "small":
        return [
            linear[0],
            SmallTensors(),
            JoinSmallTensors(),
            linear[1],
            norm,
            SmallTensors(),
            JoinSmallTensors(),
            linear[2],
        ]
    if model == "beside":
        return [
            linear[0],
            ThreeTensors(),
            StashSecond(),
            ChangeInPlace(),
            linear[1],
            norm,
            AddStashed(),
            linear[2],
        ]
    if model == "large":
        return [linear[0], LargeOutput(), FoldLarge(), linear[1], linear[2], nn.GELU(), norm, nn.Tanh()]
    if model == "batch norm":
        return [
            linear[0],
            nn.BatchNorm1d(WIDTH),
            linear[1],
            nn.BatchNorm1d(WIDTH),
            *linear[2:],
            nn.Tanh(),
            norm,
        ]
    if model == "tied":
        return [linear[0], nn.GELU(), linear[1], norm, TiedLinear(linear[0]), nn.GELU(), linear[2], nn.Tanh()]
    if model.startswith("convolutions"):
        return [
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 6, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, padding=1, groups=2),
            nn.BatchNorm2d(6),
            nn.ConvTranspose2d(6, 3, 2),
            nn.Tanh(),
        ]
    if model == "dropout":
        return [
            linear[0],
            nn.Dropout(0.3),
            linear[1],
            nn.Dropout(0.5),
            linear[2],
            norm,
            linear[3],
            nn.Dropout(0.1),
        ]
    assert model == "python", model
    return [linear[0], nn.GELU(), Branching(), norm, linear[2], nn.ReLU(), linear[3], Branching()]


def batch_of(model: str) -> Tensor:
    """Returns a random mini-batch for a model."""
    if not model.startswith("convolutions"):
        return torch.randn(BATCH, WIDTH)
    images = torch.randn(BATCH, 3, 7, 7)
    return images.to(memory_format=torch.channels_last) if model.endswith("channels last") else images


def to_device(value: object, device: str) -> object:
    if isinstance(value, tuple):
        return tuple(to_device(each, device) for each in value)
    assert isinstance(value, Tensor)
    return value.to(device)


class MovingSequential(nn.Sequential):
    """The plain loop's layers: moves boundary tensors to the next stage's device."""

    def __init__(self, layers: Sequence[nn.Module], devices: Sequence[str]) -> None:
        super().__init__(*layers)
        self.devices = devices

    def forward(self, value: object) -> object:
        for index, layer in enumerate(self):
            value = layer(to_device(value, self.devices[index // 2]))
        return value


def weighted_squares(output: Tensor, target: Tensor) -> Tensor:
    return (output.square().flatten(1).sum(1) * target).sum()


class TrainingRun:
    """A model with its optimizer and input."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model = model
        self.x = x.clone().requires_grad_()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def state(self) -> dict[str, Tensor]:
        """Returns parameters, buffers, the input, and their gradients, on the CPU."""
        named = {
            **dict(self.model.named_parameters()),
            **dict(self.model.named_buffers()),
            "the input": self.x,
        }
        gradients = {f"gradient of {name}": t.grad for name, t in named.items() if t.grad is not None}
        return {name: t.detach().cpu() for name, t in (named | gradients).items()}

    def backward(self, y: Tensor) -> None:
        y.square().mean().backward()

    def step(self, target: Tensor) -> None:
        """Runs a whole step."""
        self.model.step(self.x, target=target, loss_fn=weighted_squares, normalizer=BATCH)

    def loop(self, target: Tensor, schedule: str) -> None:
        """Runs the plain loop, whose backwards come in the order of a schedule."""
        parts = zip(self.x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True)
        with keyed_rng(self.model):
            losses = [weighted_squares(self.model(x), part) / BATCH for x, part in parts]
        for loss in reversed(losses) if schedule == "gpipe" else losses:
            loss.backward()

    def update(self) -> None:
        """Overwrites everything that the step has read, without synchronization."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.x.grad = None
        with torch.no_grad():
            self.x.add_(0.1)


def run_failing_step(pipeline: GPipe, x: Tensor, action: str, seed: int) -> None:
    """Runs a step in which an action fails; frees its tensors immediately, while work may be in flight."""
    inject_failure(pipeline, action, after=1, seed=seed, max_delay_us=MAX_DELAY_US)
    with pytest.raises(ValueError, match=rf"\(in action {action}\b"):
        pipeline(x.detach().requires_grad_()).sum().backward()
    inject_delays(pipeline, seed, MAX_DELAY_US)


def graph_problems(pipeline: GPipe) -> list[str]:
    """Returns what is wrong with the graphs of a trained pipeline."""
    reports = [report for report in pipeline_of(pipeline).graph_reports() if report.uncaptured > 1]
    if len(reports) != 1 or reports[0].obstacle or not (reports[0].forward and reports[0].backward):
        return [f"not captured: {[(r.obstacle, r.forward, r.backward, r.uncaptured) for r in reports]}"]
    return [] if reports[0].replays == STEPS - 2 else [f"replayed {reports[0].replays} times"]


def unequal(
    model: str, devices: Sequence[str], checkpoint: str, inject_failures: bool, **keywords: object
) -> list[str]:
    """Trains a pipeline, and returns how it differs from the plain loop; passes keywords to the pipeline."""
    mark = getattr(ctypes.CDLL(None), "fake_cuda_mark", lambda name: None)  # real GPUs have no log
    layers = layers_of(model)
    if model.endswith("channels last"):
        nn.Sequential(*layers).to(memory_format=torch.channels_last)
    pipeline = GPipe(
        nn.Sequential(*copy.deepcopy(layers)),
        [2] * len(devices),
        devices=devices,
        chunks=CHUNKS,
        checkpoint=checkpoint,
        **keywords,
    )
    for index, layer in enumerate(layers):
        if not isinstance(layer, TiedLinear):
            layer.to(devices[index // 2])
    # The host waits for tensors that a stage on the CPU receives, and for values that Python layers read.
    may_wait = model in IN_PYTHON or "cpu" in devices
    x, target = batch_of(model).to(devices[0]), torch.rand(BATCH).to(devices[-1])
    ours, plain = TrainingRun(pipeline, x), TrainingRun(MovingSequential(layers, devices), x)
    # Gradients of a shared parameter are added in a different order.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if model == "tied" else {"rtol": 0.0, "atol": 0.0}
    found = []
    for step in range(STEPS):
        if inject_failures:
            for action in ("2F3", "1SEND_F6", "3RECV_F1", "2RECV_B4", "1SEND_B2"):
                run_failing_step(pipeline, ours.x, action, step)
            for parameter in pipeline.parameters():
                parameter.grad = None
        torch.manual_seed(step)
        # The first two steps make plans, and are not checked for host waits.
        # The capture empties the allocator's cache, which synchronizes.
        captures = step == FIRST_CAPTURED and keywords.get("capture")
        begin = b"begin\tmay wait" if may_wait or captures else b"begin"
        mark(begin if step > 1 else b"plan")
        ours.step(target) if "schedule" in keywords else ours.backward(pipeline(ours.x))
        mark(b"end")
        torch.manual_seed(step)
        if "schedule" in keywords:
            plain.loop(target, str(keywords["schedule"]))
        else:
            with keyed_rng(plain.model):
                plain.backward(torch.cat([plain.model(part) for part in plain.x.chunk(CHUNKS)]))
        state, expected = ours.state(), plain.state()
        assert state.keys() == expected.keys()
        for name, tensor in state.items():
            if not torch.allclose(tensor, expected[name], **tolerance):
                found.append(f"step {step}: {name}")
        ours.update()
        plain.update()
    if keywords.get("capture"):
        found += graph_problems(pipeline)
    return found


def main() -> None:
    operators, models, devices, *words = sys.argv[1:]
    torch.ops.load_library(operators)
    torch.backends.cudnn.enabled = False
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # otherwise addmm may add unrounded products to gradients
    found = []
    others = "own_streams", "captured", "failures", *TRANSPORTS, *SCHEDULES
    modes = [word for word in words if word not in others]
    transport = next((word for word in words if word in TRANSPORTS), "auto")
    keywords: dict[str, object] = {"transport": transport, "capture": "captured" in words}
    for schedule in SCHEDULES.keys() & set(words):
        keywords["schedule"] = schedule
    with contextlib.ExitStack() as stack:
        if "own_streams" in words:
            for device in {device for device in devices.split(",") if device != "cpu"}:
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
        for model, mode in itertools.product(models.split("/"), modes):
            torch.manual_seed(0)
            differs = unequal(model, devices.split(","), mode, "failures" in words, **keywords)
            found += [f"{model}, {mode}: {what}" for what in differs]
    print("; ".join(found) or "equal")


if __name__ == "__main__":
    main()

"""Trains pipelines on fake devices; run by test_pipelines.py and others with the fake runtime preloaded.

`train_models.py OPERATORS MODELS DEVICES WORD...`: loads the operators, trains MODELS (``mlp/skips/..``) in
four stages on four DEVICES (``cuda:0,cpu,..``), and compares parameters, buffers and gradients with the plain
loop on the same devices. Words: a checkpoint mode (one run for each); ``captured``: steps must be captured
and replayed as graphs; ``own_streams``: the caller uses own streams; ``failures``: workers are delayed, and
failing steps run in between; names of schedules: whole steps; ``peer`` and ``pinned``: force a
transport; ``inference``: forwards under `no_grad`; ``frozen``: the first stage needs no gradients;
``deferred``: deferred batch norm, compared with a pipeline that does not capture; ``living``: before steps,
marks in the log the memory that PyTorch's allocator considers in use, while nothing of a step is held. Or
`train_models.py OPERATORS random FIRST COUNT`: random pipelines. Prints the differences, or "equal".
"""

from __future__ import annotations

import gc
import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gpipe_fast import GPipe, keyed_rng
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.runtime.settings import TRANSPORTS
from gpipe_fast.schedule import SCHEDULES
from gpipe_fast.skip import pop, skippable, stash
from tests.fake_cuda.fake_devices import caller_streams, copied, load, mark, plain_loop
from tests.internals import inject_delays, inject_failure, pipeline_of

BATCH, CHUNKS, WIDTH, STEPS = 16, 8, 12, 5
FIRST_CAPTURED = 2
MAX_DELAY_US = 1000
MODELS = ("mlp", "skips", "several", "batch norm", "dropout", "tied", "python")
MODELS += ("convolutions", "convolutions, channels last")


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


class SmallTensors(nn.Module):
    """Returns several small tensors, which are coalesced into one copy, and an empty tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.t(), x[:, ::2], (2 * x).double(), x[:, :0], x > 0, x.sum(1)


class JoinSmallTensors(nn.Module):
    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        turned, half, double, nothing, positive, sums = values
        joined = turned.t() + torch.cat([half, half], -1) * positive + double.to(turned.dtype)
        return joined + nothing.sum() + sums.unsqueeze(1)


class ThreeTensors(nn.Module):
    """Returns three tensors; not traceable."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (x.sin() if x.sum() > 0 else x.cos()), 2 * x, 3 * x


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


def layers_of(model: str) -> list[nn.Module]:
    """Returns the eight layers of a model: two for each of four stages."""
    a, b, c, d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
    norm, gelu, tanh = nn.LayerNorm(WIDTH), nn.GELU(), nn.Tanh()
    if model.startswith("convolutions"):
        first, second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2)
        grouped, last = nn.Conv2d(6, 6, 3, padding=1, groups=2), nn.ConvTranspose2d(6, 3, 2)
        return [first, nn.BatchNorm2d(4), second, nn.ReLU(), grouped, nn.BatchNorm2d(6), last, tanh]
    return {
        "mlp": [a, gelu, b, norm, c, nn.ReLU(), d, tanh],
        "skips": [StashSkip(), a, b, gelu, c, norm, PopSkip(), d],
        "several": [a, SmallTensors(), JoinSmallTensors(), b, norm, SmallTensors(), JoinSmallTensors(), c],
        "python": [a, ThreeTensors(), StashSecond(), ChangeInPlace(), b, norm, AddStashed(), c],
        "large": [a, LargeOutput(), FoldLarge(), b, c, gelu, norm, tanh],
        "batch norm": [a, nn.BatchNorm1d(WIDTH), b, nn.BatchNorm1d(WIDTH), c, d, tanh, norm],
        "tied": [a, gelu, b, norm, TiedLinear(a), nn.GELU(), c, tanh],
        "dropout": [a, nn.Dropout(0.3), b, nn.Dropout(0.5), c, norm, d, nn.Dropout(0.1)],
    }[model]


def batch_of(model: str) -> Tensor:
    """Returns a random mini-batch for a model."""
    if not model.startswith("convolutions"):
        return torch.randn(BATCH, WIDTH)
    images = torch.randn(BATCH, 3, 7, 7)
    return images.to(memory_format=torch.channels_last) if model.endswith("channels last") else images


class MovingSequential(nn.Sequential):
    """The plain loop's layers: moves them to their devices, and tensors to the device of the next layer."""

    def __init__(self, layers: Sequence[nn.Module], devices: Sequence[str]) -> None:
        super().__init__(*layers)
        self.devices = devices
        for layer, device in zip(layers, devices, strict=True):
            if not isinstance(layer, TiedLinear):
                layer.to(device)

    def forward(self, value: object) -> object:
        for layer, device in zip(self, self.devices, strict=True):
            value = layer(tree_map(lambda x, device=device: x.to(device), value))
        return value


def weighted_squares(output: Tensor, target: Tensor) -> Tensor:
    return (output.square().flatten(1).sum(1) * target).sum()


def mark_living_memory() -> None:
    """Marks the graphs' pools as a whole, and elsewhere the blocks that are in use."""
    gc.collect()
    mark("living")
    for segment in torch.cuda.memory_snapshot():
        if segment["segment_pool_id"] != (0, 0):
            mark(f"block\t{segment['address']:#x}\t{segment['total_size']}")
            continue
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                mark(f"block\t{block['address']:#x}\t{block['size']}")


class TrainingRun:
    """A model with its optimizer and input."""

    def __init__(self, model: nn.Module, x: Tensor, frozen: bool) -> None:
        self.model = model
        self.x = x.clone().requires_grad_(not frozen)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.output: dict[str, Tensor] = {}

    def state(self) -> dict[str, Tensor]:
        """Returns parameters, buffers, the input, their gradients, and the output, on the CPU."""
        named = {
            **dict(self.model.named_parameters()),
            **dict(self.model.named_buffers()),
            "the input": self.x,
        }
        gradients = {f"gradient of {name}": t.grad for name, t in named.items() if t.grad is not None}
        return {name: t.detach().cpu() for name, t in (named | gradients | self.output).items()}

    def call(self) -> None:
        """Runs a forward, and its backward where gradients are enabled."""
        is_pipeline = isinstance(self.model, GPipe)
        with nullcontext() if is_pipeline else keyed_rng(self.model):
            y = self.model(self.x) if is_pipeline else plain_loop(self.model, self.x, CHUNKS)
            self.output = {"the output": y.detach()}
            if y.requires_grad:
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
        self.x.grad, self.output = None, {}
        with torch.no_grad():
            self.x.add_(0.1)


def run_failing_step(pipeline: GPipe, x: Tensor, action: str, seed: int) -> None:
    """Runs a step in which an action fails; frees its tensors immediately, while work may be in flight."""
    inject_failure(pipeline, action, after=1, seed=seed, max_delay_us=MAX_DELAY_US)
    with pytest.raises(ValueError, match=rf"\(in action {action}\b"):
        pipeline(x.detach().requires_grad_()).sum().backward()
    inject_delays(pipeline, seed, MAX_DELAY_US)


def graph_problems(pipeline: GPipe, inference: bool) -> list[str]:
    """Returns what is wrong with the graphs of a trained pipeline."""
    reports = [report for report in pipeline_of(pipeline).graph_reports() if report.uncaptured > 1]
    if (
        len(reports) != 1
        or reports[0].obstacle
        or not (reports[0].forward and (inference or reports[0].backward))
    ):
        return [f"not captured: {[(r.obstacle, r.forward, r.backward, r.uncaptured) for r in reports]}"]
    return [] if reports[0].replays == STEPS - 2 else [f"replayed {reports[0].replays} times"]


def unequal(
    model: str,
    devices: Sequence[str],
    checkpoint: str,
    inject_failures: bool,
    balance: Sequence[int] = (),
    words: Sequence[str] = (),
    **keywords: object,
) -> list[str]:
    """Trains a pipeline, and returns how it differs from the plain loop; passes keywords to the pipeline."""
    layers, balance = layers_of(model), balance or [2] * len(devices)
    frozen, inference = "frozen" in words, "inference" in words
    if frozen:
        nn.Sequential(*layers[: balance[0]]).requires_grad_(False)
    if model.endswith("channels last"):
        nn.Sequential(*layers).to(memory_format=torch.channels_last)
    keywords |= {"balance": balance, "devices": devices, "chunks": CHUNKS, "checkpoint": checkpoint}
    pipeline = GPipe(copied(layers), **{"capture": True, **keywords})
    # The host waits for tensors that a stage on the CPU receives, and for values that Python layers read.
    may_wait = model == "python" or "cpu" in devices
    x, target = batch_of(model).to(devices[0]), torch.rand(BATCH).to(devices[-1])
    places = [device for device, number in zip(devices, balance, strict=True) for _ in range(number)]
    if keywords.get("deferred_batch_norm"):
        reference: nn.Module = GPipe(copied(layers), **{**keywords, "capture": False})
    else:
        reference = MovingSequential(layers, places)
    ours, plain = TrainingRun(pipeline, x, frozen), TrainingRun(reference, x, frozen)
    # Gradients of a shared parameter are added in a different order.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if model == "tied" else {"rtol": 0.0, "atol": 0.0}
    found = []
    mark("pipeline")
    for step in range(STEPS):
        if inject_failures:
            for action in ("2F3", "1SEND_F6", "3RECV_F1", "2RECV_B4", "1SEND_B2"):
                run_failing_step(pipeline, ours.x, action, step)
            pipeline.zero_grad()
        torch.manual_seed(step)
        # The first two steps make plans, and are not checked for host waits.
        # The capture empties the allocator's cache, which synchronizes.
        captures = step == FIRST_CAPTURED and keywords.get("capture")
        if "living" in words:
            mark_living_memory()
        mark("plan" if step < 2 else "begin\tmay wait" if may_wait or captures else "begin")
        with torch.set_grad_enabled(not inference):
            ours.step(target) if "schedule" in keywords else ours.call()
        mark("end")
        torch.manual_seed(step)
        if "schedule" in keywords:
            plain.loop(target, str(keywords["schedule"]))
        else:
            with torch.set_grad_enabled(not inference):
                plain.call()
        state, expected = ours.state(), plain.state()
        assert state.keys() == expected.keys()
        for name, tensor in state.items():
            if not torch.allclose(tensor, expected[name], **tolerance):
                found.append(f"step {step}: {name}")
        ours.update()
        plain.update()
    if keywords.get("capture"):
        found += graph_problems(pipeline, inference)
    return found


def random_case(number: int) -> list[str]:
    """Trains a random pipeline, and returns how it differs from the plain loop."""
    draw = random.Random(number)
    model = draw.choice(MODELS)
    cuts = sorted(draw.sample(range(1, 8), draw.randint(0, 3)))
    balance = [end - begin for begin, end in itertools.pairwise([0, *cuts, 8])]
    gpus = [f"cuda:{i}" for i in range(draw.choice((1, 2, 4)))]
    devices = [draw.choice([*gpus, *gpus, "cpu"]) for _ in balance]
    keywords: dict[str, object] = {
        "capture": "cpu" not in devices and model != "python" and draw.random() < 0.3
    }
    keywords["transport"] = draw.choice(("auto", "pinned"))
    if model not in ("tied", "several") and draw.random() < 0.5:
        keywords["schedule"] = draw.choice([name for name in SCHEDULES if name != "interleaved"])
        keywords["capture"] = False
    checkpoint = draw.choice(CHECKPOINT_MODES)
    case = f"case {number}: {model}, {balance} on {devices}, {checkpoint}, {keywords}"
    torch.manual_seed(number)
    with caller_streams(devices if draw.random() < 0.5 else ()):
        return [f"{case}: {what}" for what in unequal(model, devices, checkpoint, False, balance, **keywords)]


def main() -> None:
    operators, models, devices, *words = sys.argv[1:]
    load(operators)
    found = []
    if models == "random":
        for number in range(int(devices), int(devices) + int(words[0])):
            found += random_case(number)
        words = []
    modes = [word for word in words if word in CHECKPOINT_MODES]
    transport = next((word for word in words if word in TRANSPORTS), "auto")
    keywords: dict[str, object] = {"transport": transport, "capture": "captured" in words}
    keywords["deferred_batch_norm"] = "deferred" in words
    for schedule in SCHEDULES.keys() & set(words):
        keywords["schedule"] = schedule
    with caller_streams(devices.split(",") if "own_streams" in words else ()):
        for model, mode in itertools.product(models.split("/"), modes):
            torch.manual_seed(0)
            differs = unequal(model, devices.split(","), mode, "failures" in words, words=words, **keywords)
            found += [f"{model}, {mode}: {what}" for what in differs]
    print("; ".join(found) or "equal")


if __name__ == "__main__":
    main()

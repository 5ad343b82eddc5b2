"""Steps within a memory: the bits of the plain loop, and choices that fit by their own prediction.

What PyTorch's allocator counts is compared in tests/fake_cuda/test_memory.py.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models.gpt import blocks
from gpipe_fast import GPipe, is_recomputing, tune
from gpipe_fast.container import runner_of
from gpipe_fast.layers.structure import Inputs
from gpipe_fast.runtime.first_balance import fastest_of
from gpipe_fast.runtime.stage_memory import StageBytes
from gpipe_fast.schedule import SCHEDULES
from tests.models.test_paper_models import SMALL
from tests.reference import SEED, Result, leaf, loop_step, pipeline_step, unequal
from tests.untraceable import FunctionLayer

pytestmark = pytest.mark.usefixtures("one_thread")


CHUNKS = 4


def mean(output: Tensor) -> Tensor:
    return output.square().flatten(1).mean(1).sum()


def needed(pipe: GPipe, x: Tensor, **call: object) -> int:
    """Returns the predicted bytes of the device."""
    total = pipe.memory(x, **call).totals["cpu"]  # type: ignore[arg-type]
    assert total is not None
    return total


def gpt(**options: object) -> tuple[GPipe, Tensor]:
    torch.manual_seed(SEED)
    layers = nn.Sequential(*blocks(5, 32), nn.Linear(32, 256), nn.Linear(256, 32))
    options = {"devices": ["cpu"] * 2, "chunks": CHUNKS} | options
    return GPipe(layers, **options), torch.randn(8, 32, 32)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", [n if n == "GPT" else pytest.param(n, marks=pytest.mark.extended) for n in SMALL]
)
def test_calls_within_a_memory_equal_the_plain_loop(name: str) -> None:
    make, batch = SMALL[name]

    def made(**options: Any) -> GPipe:
        torch.manual_seed(SEED)
        layers = make()
        balance = [len(layers) - len(layers) // 2, len(layers) // 2]
        return GPipe(layers, balance, devices=["cpu"] * 2, chunks=CHUNKS, backend="aten", **options)

    x = batch()
    differentiated = leaf(x)  # as the steps do, so that gradients of inputs count
    ends = [needed(made(checkpoint=checkpoint), differentiated) for checkpoint in ("always", "never")]
    torch.manual_seed(SEED)
    expected = loop_step(make(), x, CHUNKS)
    for share in (0.3, 0.7):
        limit = int(ends[0] + share * (ends[1] - ends[0]))
        pipe = made(memory=limit)
        assert unequal(pipeline_step(pipe, x), expected) == []
        assert needed(pipe, differentiated) <= limit


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_within_a_memory_has_the_bits_of_any_step(schedule: str) -> None:
    call = {"loss_fn": mean, "normalizer": 8}
    same = {"balance": [3, 4], "schedule": schedule}
    ends = [needed(*gpt(checkpoint=checkpoint, **same), **call) for checkpoint in ("always", "never")]
    limit, found = sum(ends) // 2, []
    for options in ({"memory": limit}, {"checkpoint": "never"}):
        pipe, x = gpt(**same, **options)
        torch.manual_seed(SEED)
        loss = pipe.step(x, **call)
        found.append(Result({"loss": loss} | {name: p.grad for name, p in pipe.named_parameters()}))
        if "memory" in options:  # lets stages save something, but not everything
            assert ends[0] < needed(pipe, x, **call) <= limit
    assert unequal(*found) == []


def test_more_memory_saves_more_and_a_limit_may_be_set_and_lifted() -> None:
    pipe, x = gpt(balance=[3, 4], checkpoint="always")
    least, kept = needed(pipe, x), []
    for factor in (1.15, 1.3, 1.6, 4.0):
        pipe.memory_limit = int(factor * least)
        rows = pipe.memory(x).stages
        kept.append(sum(own.saved for own in rows if own is not None))
    assert all(a <= b for a, b in pairwise(kept))
    assert kept[0] < kept[-1]
    assert not pipe.capture  # CUDA graphs need more
    pipe.memory_limit, pipe.checkpoint = None, "never"
    assert pipe.capture
    assert sum(own.saved for own in pipe.memory(x).stages if own is not None) == kept[-1]


def test_tune_returns_settings_within_a_memory() -> None:
    pipe, x = wide(balance=[4, 4])
    before = list(pipe.balance)
    pipe.chunks = "auto"
    found = tune(pipe, x, memory="1MiB")
    assert 1 <= len(found.choices) <= 3
    assert pipe.balance == before
    seconds = [each.seconds for each in found.choices]
    assert seconds == sorted(seconds)
    assert all(sum(each.bytes) <= 1 << 20 for each in found.choices)
    assert str(found).count("model.memory_limit = '1MiB'") == len(found.choices)
    exec(found.code, {"model": pipe})
    assert needed(pipe, x) <= 1 << 20


def test_what_is_predicted_is_what_a_recording_counts() -> None:
    pipe, x = gpt(balance=[3, 4], checkpoint="except_last")
    target = torch.zeros_like(x)
    report = pipe.memory(x, target=target, loss_fn=F.mse_loss, optimizer=torch.optim.AdamW)
    recorded = pipe.report(x, target=target, loss_fn=F.mse_loss).memory
    shapes = pipe.memory(x.to("meta"), target=target.to("meta"), loss_fn=F.mse_loss)
    assert shapes.stages == report.stages
    assert report.to_dict()["totals"]["cpu"] == sum(
        own.total + state for own, state in zip(report.stages, report.optimizer, strict=True) if own
    )
    for own, state, measured in zip(report.stages, report.optimizer, recorded, strict=True):
        assert own is not None
        assert own.parameters == measured.parameters
        assert 2 * own.parameters <= state <= 2 * own.parameters + 1024  # AdamW's moments and steps
        assert own.saved <= measured.saved or own.boundary + own.saved <= measured.boundary + measured.saved
        assert own.intermediates >= measured.scratch
    text = str(report)
    assert all(name in text for name in StageBytes._fields)
    assert "<table>" in report._repr_html_()


def wide(**options: object) -> tuple[GPipe, Tensor]:
    torch.manual_seed(SEED)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)]
    pipe = GPipe(nn.Sequential(*layers), devices=["cpu"] * 2, **options)  # type: ignore[arg-type]
    return pipe, torch.randn(64, 64)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_a_memory_that_is_enough_is_accepted_and_used(chunks: int) -> None:
    """A limit is used to within a tenth, or nothing is recomputed.

    A single micro-batch needs less if nothing is recomputed than if everything is.
    """
    ends = []
    for checkpoint in ("always", "never"):
        pipe, x = wide(balance=[4, 4], chunks=chunks, checkpoint=checkpoint)
        ends.append(needed(pipe, x))
    for share in (0.0, 0.5, 1.0):
        limit = int(ends[0] + share * (ends[1] - ends[0]))
        pipe, x = wide(balance=[4, 4], chunks=chunks, memory=limit)
        if ends[1] <= limit:
            assert needed(pipe, x) == ends[1]
        else:
            assert 0.9 * limit <= needed(pipe, x) <= limit, share
    pipe, x = wide(balance=[4, 4], chunks=chunks, memory=int(0.97 * min(ends)))
    # Rounded up, so that what the message says is enough.
    least = math.ceil(ends[0] / 2**20 * 10) / 10
    with pytest.raises(ValueError, match=f"at least {least} MiB is needed"):
        pipe(x)
    pipe.memory_limit = f"{least}MiB"
    pipe(x)


def test_a_balance_is_chosen_that_fits() -> None:
    """Where estimates of layers alone would refuse all balances, the plan decides."""

    def small(**options: object) -> tuple[GPipe, Tensor]:
        torch.manual_seed(SEED)
        layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 64), nn.Linear(64, 8))
        return GPipe(layers, devices=["cpu"] * 2, chunks=8, **options), torch.ones(16, 8)  # type: ignore[arg-type]

    limit = needed(*small(balance=[3, 1], checkpoint="always"))
    pipe, x = small(memory=limit)
    pipe(x).sum().backward()
    assert needed(pipe, x) <= limit
    pipe, x = small(memory=limit // 2)
    before = list(pipe.balance)
    with pytest.raises(ValueError, match=r"at least .* is needed"):
        pipe(x)
    assert pipe.balance == before


@pytest.fixture
def estimated_times() -> Iterator[None]:
    """Under deterministic algorithms, the times of operators are not measured."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.usefixtures("estimated_times")
def test_a_balance_is_chosen_with_which_a_step_is_nearly_the_fastest(seed: int) -> None:
    rng = random.Random(seed)
    widths = [rng.choice([32, 64, 128, 256]) for _ in range(6)]
    layers = nn.Sequential(
        *(nn.Sequential(nn.Linear(a, 4 * b), nn.GELU(), nn.Linear(4 * b, b)) for a, b in pairwise(widths))
    )
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "chunks": rng.choice([2, 4])}
    x = torch.randn(64, widths[0])
    balances = [(first, 5 - first) for first in range(1, 5)]
    least, most = (
        min(needed(GPipe(layers, own, checkpoint=mode, **options), x) for own in balances)
        for mode in ("always", "never")
    )
    limit = int(least + rng.choice([0.05, 0.2, 0.5]) * (most - least))
    pipe = GPipe(layers, memory=limit, **options)
    runner, limits = runner_of(pipe), {torch.device("cpu"): limit}
    call = runner.call_of(Inputs.of((x,), {}), True)
    found, _ = fastest_of(runner, [(own, call) for own in balances], limits)
    times = {balance: choice.nanoseconds for choice, balance, _ in found}
    pipe(x)
    assert times[tuple(pipe.balance)] <= 1.02 * min(times.values())


def test_the_balance_that_needs_least_is_found() -> None:
    """Stages that share a device need little if one has most layers, which are recomputed in turn."""

    def narrowing(**options: object) -> tuple[GPipe, Tensor]:
        torch.manual_seed(SEED)
        sizes = [8, 512, 256, 128, 64, 32]
        layers = (nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes))
        pipe = GPipe(nn.Sequential(*layers), devices=["cpu"] * 3, chunks=4, **options)  # type: ignore[arg-type]
        return pipe, torch.ones(512, 8)

    balances = [[1, 1, 3], [1, 2, 2], [1, 3, 1], [2, 1, 2], [2, 2, 1], [3, 1, 1]]
    least = min(needed(*narrowing(balance=own, checkpoint="always")) for own in balances)
    limit = least + least // 1000
    pipe, x = narrowing(memory=limit)
    pipe(x).sum().backward()
    assert needed(pipe, x) <= limit
    pipe, x = narrowing()
    assert all(sum(own.bytes) <= limit for own in tune(pipe, x, memory=limit).choices)


def test_the_balance_of_a_step_is_chosen_for_its_schedule() -> None:
    """1F1B keeps fewer micro-batches, so a step fits where a call of fill-drain would not."""
    call = {"loss_fn": mean, "normalizer": 64}
    pipe, x = wide(balance=[4, 4], chunks=32, schedule="1f1b", checkpoint="always")
    limit = int(1.05 * needed(pipe, x, **call))
    assert limit < needed(pipe, x)
    pipe, x = wide(chunks=32, schedule="1f1b", memory=limit)
    pipe.step(x, **call)
    assert needed(pipe, x, **call) <= limit
    pipe, x = wide(chunks=32, memory=limit)
    with pytest.raises(ValueError, match=r"at least .* is needed"):
        pipe(x)


def test_memory_on_gpus_that_the_machine_lacks() -> None:
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
        x = torch.empty(64, 64)
    call = {"target": x, "loss_fn": F.mse_loss, "optimizer": torch.optim.AdamW, "device": "cuda"}
    report = GPipe(layers, [4, 4], devices=["cpu"] * 2, chunks=4).memory(x, **call)  # type: ignore[arg-type]
    assert report.devices == ("cuda:0", "cuda:1")
    assert report.stages == wide(balance=[4, 4], chunks=4)[0].memory(x, **call).stages  # type: ignore[arg-type]
    parameters = 4 * (4 * 64 * 64 + 512)  # a bias takes a block of 512 bytes
    assert [own and own.parameters for own in report.stages] == [parameters] * 2
    # On the CPU, both stages have their tensors on one device, and nothing is copied between them.
    first, second = report.stages
    assert first is not None
    assert second is not None
    assert second.boundary > 0
    with pytest.raises(RuntimeError, match=r"on the meta device.*or pass device='cuda' to memory"):
        GPipe(layers, [4, 4], devices=["cpu"] * 2, chunks=4).memory(x)
    pipe, x = wide(balance=[4, 4], chunks=2, backend="eager")
    assert pipe.memory(x, device="cuda").stages == (None, None)


def test_layers_in_python_are_known_after_a_run() -> None:
    branch = FunctionLayer(lambda f, x: x if x.sum() > -1e9 else -x)
    pipe = GPipe(nn.Sequential(nn.Linear(6, 6), branch), [1, 1], devices=["cpu"] * 2, chunks=2)
    x = torch.randn(8, 6)
    for _ in range(2):  # before and after a run
        report = pipe.memory(x)
        assert report.stages == (None, None)
        assert report.totals == {"cpu": None}
        assert report.unknown[0] == "depends on the tensors of stage 1"
        assert re.match(r"layer 1 \(FunctionLayer\) .*: .*Data-dependent branching", report.unknown[1])
        assert report.unknown[1] in str(report)
        assert "layer 1 (FunctionLayer)" in report._repr_html_()
        pipe(x)


@pytest.mark.parametrize("share", [0.25, 0.75, 1.0])
def test_layers_in_python_save_nothing_with_a_share_below_1(share: float) -> None:
    phases: list[bool] = []

    def ask(f: nn.Module, x: Tensor) -> Tensor:
        phases.append(is_recomputing())
        return x.tanh()

    torch.manual_seed(SEED)
    model, x = nn.Sequential(nn.Linear(6, 6), FunctionLayer(ask), nn.Linear(6, 3)), torch.randn(8, 6)
    expected = loop_step(model, x, CHUNKS)
    phases.clear()
    pipe = GPipe(model, [3], chunks=CHUNKS, checkpoint=share, backend="eager")
    assert unequal(pipeline_step(pipe, x), expected) == []
    assert phases == [False] * CHUNKS + [True] * (CHUNKS if share < 1 else 0)

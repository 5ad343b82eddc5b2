"""Steps and evaluations that fail change nothing (contract 7)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast import GPipe
from gpipe_fast.container import runner_of
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.schedule import SCHEDULES
from tests.contracts.contract_1_same_bits.test_step_updates import STEP, pipeline, sgd
from tests.contracts.contract_1_same_bits.test_step_updates import X as INPUT
from tests.contracts.contract_1_same_bits.test_steps import X, Y, layers
from tests.reference import SEED, unequal

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*stages idle")]


def failures_change_nothing(schedule: Any, num_faults: int, seed: int) -> None:
    """Lets random actions of a step fail, at its begin or end, and compares everything with before."""
    draw = random.Random(seed)
    pipe = GPipe(
        layers(),
        [2, 2, 2, 2],
        devices=["cpu"] * 4,
        chunks=4,
        checkpoint=draw.choice(CHECKPOINT_MODES),
        schedule=schedule,
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    pipe.step(X, target=Y, loss_fn=F.cross_entropy, optimizer=optimizer)
    ((longer, *_),) = runner_of(pipe).with_losses.values()
    actions = [str(action) for row in longer.planner.latest.schedule.stages for action in row]

    def everything() -> dict[str, Tensor]:
        found = {name: t.detach() for name, t in (*pipe.named_parameters(), *pipe.named_buffers())}
        found |= {f"gradient of {name}": p.grad for name, p in pipe.named_parameters()}
        states = optimizer.state_dict()["state"]
        return found | {f"momentum {i}": state["momentum_buffer"] for i, state in states.items()}

    before = {name: t.clone() for name, t in everything().items()}
    for _ in range(num_faults):
        longer.pipeline.inject_faults(faults=[(draw.choice(actions), 0, "RuntimeError")])
        with pytest.raises(RuntimeError, match="injected"):
            pipe.step(X, target=Y, loss_fn=F.cross_entropy, optimizer=optimizer)
        assert unequal(everything(), before) == []
    longer.pipeline.inject_faults(faults=[("1F2", 0, "RuntimeError")])
    with pytest.raises(RuntimeError, match="injected"):
        pipe.evaluate(X, target=Y, loss_fn=F.cross_entropy)
    assert unequal(everything(), before) == []
    longer.pipeline.inject_faults()
    pipe.step(X, target=Y, loss_fn=F.cross_entropy, optimizer=optimizer)
    assert unequal(everything(), before) != []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_random_failures_change_nothing(schedule: str) -> None:
    failures_change_nothing(schedule, 6, 0)


@pytest.mark.soak
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_thousand_failures_change_nothing(schedule: str) -> None:
    failures_change_nothing(schedule, 250, 1)


def test_an_optimizer_that_raises_leaves_the_gradients() -> None:
    pipe, other = pipeline(), pipeline()
    optimizer, losses = sgd(pipe), []

    def refuse(*args: Any) -> None:
        raise KeyError("refused")

    optimizer.register_step_pre_hook(refuse)
    torch.manual_seed(SEED)
    with pytest.raises(KeyError, match="refused"):
        pipe.step(INPUT, **STEP, optimizer=optimizer, losses=losses)
    torch.manual_seed(SEED)
    other.step(INPUT, **STEP)
    assert losses == []
    for ours, theirs in zip(pipe.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
        assert torch.equal(ours, theirs)

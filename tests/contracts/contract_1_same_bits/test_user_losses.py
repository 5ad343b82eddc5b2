"""`GPipe.step` with the losses of a table: equal to the loss of the whole mini-batch, or refused."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.schedule import SCHEDULES
from tests.contracts.contract_1_same_bits.losses import CASES, REFUSAL, Case
from tests.reference import Result, unequal
from tests.sampling import sample, seed

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*stages idle", "ignore:reduction. 'mean' divides"),
]
NUM_SAMPLES, NUM_DRAWN = 10, 24
CHUNKS = 1, 3, 4, 7
EQUAL, REFUSED = ([n for n, c in CASES.items() if c.expected == kind] for kind in ("equal", "refused"))


def cases() -> list[Any]:
    """Returns each loss with every schedule. `make test` draws losses, and a schedule for each."""
    drawn, params = sample(EQUAL, NUM_DRAWN, salt="losses"), []
    for name in EQUAL:
        choice = sample([*SCHEDULES], 1, salt=name)
        for schedule in SCHEDULES:
            marks = () if name in drawn and schedule in choice else (pytest.mark.extended,)
            params.append(pytest.param(name, schedule, marks=marks, id=f"{name}, {schedule}"))
    return params


def layers_of(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    return case.layers().to(case.dtype)


def made(case: Case) -> Callable[..., Tensor]:
    torch.manual_seed(1)
    return case.make()


def input_of(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(NUM_SAMPLES, *case.shape, generator=generator, dtype=torch.float64).to(case.dtype)


def target_of(case: Case) -> tuple[Any, ...]:
    """Returns the target as a tuple; an empty one if the loss has none."""
    if case.target is None:
        return ()
    target = case.target(NUM_SAMPLES)
    return (tree_map(lambda t: t.to(case.dtype) if t.is_floating_point() else t, target),)


def parameters_of(loss_fn: Any) -> dict[str, nn.Parameter]:
    """Returns the parameters of a loss that is a module, or a method of one."""
    module = getattr(loss_fn, "__self__", loss_fn)
    return dict(module.named_parameters()) if isinstance(module, nn.Module) else {}


def state(model: nn.Module, loss_fn: Any, x: Tensor, loss: Tensor) -> Result:
    found: Result = {"loss": loss.detach(), "gradient of x": x.grad}
    found |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
    return found | {f"gradient of the loss's {n}": p.grad for n, p in parameters_of(loss_fn).items()}


@pytest.mark.parametrize(("name", "schedule"), cases())
def test_a_step_equals_the_loss_of_the_whole(name: str, schedule: str) -> None:
    case, draw = CASES[name], random.Random(f"{seed()}/{name}/{schedule}")
    target, x = target_of(case), input_of(case).requires_grad_()
    plain, loss_fn = layers_of(case), made(case)
    loss = loss_fn(plain(x), *target)
    loss.backward()
    expected = state(plain, loss_fn, x, loss)

    model, loss_fn = layers_of(case), made(case)
    balance = draw.choice([[3], [2, 1], [1, 2], [1, 1, 1]] if schedule != "interleaved" else [[3], [1, 1, 1]])
    balance, checkpoint = [*balance, len(model) - sum(balance)], draw.choice(CHECKPOINT_MODES)
    pipe = GPipe(model, balance, schedule=schedule, checkpoint=checkpoint)
    for chunks in draw.sample(CHUNKS, len(CHUNKS)):
        pipe.chunks, x = chunks, x.detach().requires_grad_()
        for parameter in (*pipe.parameters(), *parameters_of(loss_fn).values()):
            parameter.grad = None
        loss = pipe.step(x, target=target[0] if target else None, loss_fn=loss_fn)
        found = state(pipe, loss_fn, x, loss)
        for key, value in expected.items():
            check_close(found[key], value, f"{key} with {chunks} micro-batches")
        if chunks == 1:
            assert unequal(found, expected) == []


def check_close(found: Tensor | None, expected: Tensor | None, what: str) -> None:
    if found is None or expected is None:
        assert found is expected, what
        return
    tolerance = 1e-11 if expected.dtype == torch.float64 else 2e-6
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance, msg=lambda message: f"{what}: {message}"
    )


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_compares_samples_is_refused(name: str) -> None:
    case, target, model = CASES[name], target_of(CASES[name]), layers_of(CASES[name])
    chunks = random.Random(f"{seed()}/{name}").choice(CHUNKS[1:])
    pipe = GPipe(model, [3, len(model) - 3], chunks=chunks)
    with pytest.raises(ValueError) as caught:
        pipe.step(input_of(case), target=target[0] if target else None, loss_fn=made(case))
    message = str(caught.value)
    assert [way for way in REFUSAL if not re.search(way, message)] == [], message
    assert all(parameter.grad is None for parameter in pipe.parameters())

"""`GPipe.step` against the plain loop that adds up gradients in the order of the schedule."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe_fast
from gpipe_fast import GPipe, replicate
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.schedule import SCHEDULES, Action, Kind, Schedule
from tests.contracts.contract_1_same_bits.test_skip_connections import AddSkip, StashInput
from tests.internals import balance_is_pending
from tests.reference import SEED, unequal
from tests.unit.schedule import test_schedule_csv

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*stages idle")]
WIDTH, CLASSES = 6, 5
X = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(1))
Y = torch.randint(CLASSES, (9,), generator=torch.Generator().manual_seed(2))
Y[3] = -100


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        StashInput(),
        nn.BatchNorm1d(WIDTH),
        nn.Dropout(0.2),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        AddSkip(),
        nn.Linear(WIDTH, CLASSES),
    )


def state_of(model: nn.Module, loss: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"loss": loss.detach()}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return found | {f"buffer {name}": b.clone() for name, b in model.named_buffers()}


def plain_step(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    chunks: int,
    schedule: str,
    total: Callable[..., Tensor],
    divisor: Any,
) -> dict[str, Any]:
    torch.manual_seed(SEED)
    model.zero_grad()
    with gpipe_fast.keyed_rng(model):
        losses = [total(model(a), b) / divisor for a, b in zip(x.chunk(chunks), y.chunk(chunks), strict=True)]
    for loss in reversed(losses) if schedule == "gpipe" else losses:
        loss.backward()
    return state_of(model, sum(losses[1:], losses[0]))


def step(pipe: Any, x: Tensor, y: Tensor, **options: Any) -> dict[str, Any]:
    torch.manual_seed(SEED)
    pipe.zero_grad()
    loss = pipe.step(x, target=y, **{"loss_fn": F.cross_entropy, **options})
    return state_of(pipe, loss)


cross_entropy = functools.partial(F.cross_entropy, reduction="sum")


def drawn_schedule(seed: int, num_stages: int, num_microbatches: int) -> Schedule:
    """Returns a random schedule: with one or two stages on a rank, and with or without split backwards."""
    draw = random.Random(seed)
    num_ranks = draw.choice([n for n in (num_stages, num_stages - 1, num_stages // 2) if n])
    rank_of = [draw.randrange(num_ranks) for _ in range(num_stages)]
    splits = [[draw.random() < 0.6 for _ in range(num_microbatches)] for _ in range(num_stages)]
    ranks: list[list[Action]] = [[] for _ in range(num_ranks)]
    num_forwards = [0] * num_stages
    backwards, waiting = ([list[int]() for _ in range(num_stages)] for _ in range(2))
    while True:
        options: list[Action] = []
        for s in range(num_stages):
            if num_forwards[s] < (num_forwards[s - 1] if s else num_microbatches):
                options.append(Action(s, Kind.F, num_forwards[s]))
            # Connections keep the order, so that all stages run backwards in that of the last one.
            is_last = s == num_stages - 1
            arrived = range(num_forwards[s]) if is_last else backwards[s + 1][len(backwards[s]) :][:1]
            options += [
                Action(s, Kind.I if splits[s][m] else Kind.B, m) for m in arrived if m not in backwards[s]
            ]
            options += [Action(s, Kind.W, m) for m in waiting[s]]
        if not options:
            return Schedule.of([row for row in ranks if row], num_microbatches)
        action = draw.choice(options)
        s, m = action.stage, action.microbatch
        ranks[rank_of[s]].append(action)
        if action.kind is Kind.F:
            num_forwards[s] += 1
        elif action.kind is Kind.W:
            waiting[s].remove(m)
        else:
            backwards[s].append(m)
            waiting[s] += [m] if action.kind is Kind.I else []


def gradients_in_order(
    model: nn.Sequential, balance: list[int], schedule: Schedule, x: Tensor, y: Tensor, divisor: Any
) -> dict[str, Any]:
    """Adds up the gradients of each stage in the order in which it computes those of weights."""
    torch.manual_seed(SEED)
    with gpipe_fast.keyed_rng(model):
        parts = zip(*(t.chunk(schedule.num_microbatches) for t in (x, y)), strict=True)
        losses = [cross_entropy(model(a), b) / divisor for a, b in parts]
    each = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    sums: dict[str, Any] = {"loss": sum(losses[1:], losses[0]).detach()}
    ends = list(itertools.accumulate(balance))
    for position, (name, _) in enumerate(model.named_parameters()):
        stage = next(i for i, end in enumerate(ends) if int(name.split(".")[0]) < end)
        order = [a.microbatch for a in schedule.stages[stage] if a.kind in (Kind.B, Kind.W)]
        sums[f"gradient of {name}"] = functools.reduce(torch.add, (each[m][position] for m in order))
    return sums | {f"buffer {name}": b.clone() for name, b in model.named_buffers()}


@pytest.mark.parametrize("name", test_schedule_csv.CLASSES)
def test_schedules_dumped_by_pytorch_run(name: str, tmp_path: Path) -> None:
    if not hasattr(test_schedule_csv.pipelining, name):
        pytest.skip(f"this version of PyTorch has no {name}")
    schedule = Schedule.from_csv(test_schedule_csv.dumped(name, 2, 8, "compute_comms", tmp_path))
    balance, x, y = [2, 2, 2, 2], X.repeat(2, 1)[:16], Y.repeat(2)[:16]
    pipe = GPipe(layers(), balance, chunks=8, schedule=schedule)
    ours = step(pipe, x, y)
    assert unequal(ours, gradients_in_order(layers(), balance, schedule, x, y, (y != -100).sum())) == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(40))
def test_a_schedule_of_the_user_equals_the_plain_loop(seed: int) -> None:
    balance = [[8], [3, 5], [2, 3, 3], [2, 2, 2, 2]][seed % 4]
    chunks, mode = (1, 2, 3, 4)[seed // 4 % 4], CHECKPOINT_MODES[seed % 3]
    schedule = drawn_schedule(seed, len(balance), chunks)
    x, y = X[:8], Y[:8]
    pipe = GPipe(layers(), balance, chunks=chunks, checkpoint=mode, schedule=schedule)
    for _ in range(2):
        ours = step(pipe, x, y)
    plain = layers()
    gradients_in_order(plain, balance, schedule, x, y, 7)
    assert unequal(ours, gradients_in_order(plain, balance, schedule, x, y, (y != -100).sum())) == []


WEIGHTS = torch.rand(CLASSES, generator=torch.Generator().manual_seed(3)) + 0.5
PROBABILITIES = torch.rand(9, CLASSES, generator=torch.Generator().manual_seed(4)).softmax(1)


def without_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def test_a_loss_of_ones_own_with_a_normalizer_and_nested_targets() -> None:
    """The normalizer gets the target itself, and returns one number of any shape and dtype."""

    def loss(output: Tensor, target: dict[str, Any]) -> Tensor:
        difference = ((output - target["y"]).abs() * target["weights"]).sum(1)
        return (difference * target["mask"][0]).sum() * target["factor"]

    mask = (torch.arange(9) % 3 > 0).float()
    target = {"y": PROBABILITIES, "mask": [mask], "factor": 2, "weights": WEIGHTS}
    pipe, plain = GPipe(without_norm(), [1, 2], chunks=4), without_norm()
    leaf = torch.tensor([[2.0]], dtype=torch.float64, requires_grad=True)
    losses: list[Tensor] = []
    found, output = pipe.step(
        X,
        target=target | {"weights": replicate(WEIGHTS)},
        loss_fn=loss,
        normalizer=lambda target: target["mask"][0].sum() * leaf,
        losses=losses,
        return_outputs=True,
    )
    expected = loss(plain(X), target) / (2 * mask.sum())
    assert (found.shape, found.requires_grad, output.requires_grad) == (torch.Size([]), False, False)
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(output, plain(X).detach())
    assert len(losses) == 3
    torch.testing.assert_close(sum(losses[1:], losses[0]), found)


class CountCalls(nn.Module):
    """Runs in Python because it changes an attribute."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_a_loss_has_its_own_dtype_behind_a_layer_in_python(
    dtypes: tuple[torch.dtype, torch.dtype], backend: str
) -> None:
    def total(output: Tensor, target: Tensor) -> Tensor:
        return (output.to(dtypes[1]) - target).square().sum()

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), CountCalls(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        return model.to(dtypes[0])

    x, y = X.to(dtypes[0]), X.to(dtypes[1]).flip(0)
    pipe, plain = GPipe(layers(), [2, 2], chunks=3, backend=backend), layers()
    for _ in range(2):  # from the second step on, the loss runs as a program with the backend "auto"
        found = step(pipe, x, y, loss_fn=total, normalizer=7)
        expected = plain_step(plain, x, y, 3, "gpipe", total, 7)
        torch.testing.assert_close(found.pop("loss"), expected.pop("loss"))  # divided after it is added up
        assert unequal(found, expected) == []


def test_gradients_accumulate_and_hooks_are_called() -> None:
    pipe, seen = GPipe(without_norm(), [1, 2], chunks=2), []
    pipe.step(X, target=Y, loss_fn=F.cross_entropy)
    once = [p.grad.clone() for p in pipe.parameters()]
    for parameter in pipe.parameters():
        parameter.register_hook(lambda gradient: seen.append("tensor"))
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    pipe.step(X, target=Y, loss_fn=F.cross_entropy)
    assert all(torch.equal(p.grad, g + g) for p, g in zip(pipe.parameters(), once, strict=True))
    assert sorted(seen) == ["accumulated"] * 4 + ["tensor"] * 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_weight_of_two_stages_gets_the_sum_of_their_gradients(schedule: str) -> None:
    def layers(is_tied: bool) -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        if is_tied:
            model[2].weight = model[0].weight
        else:
            model[2].load_state_dict(model[2].state_dict() | {"weight": model[0].weight.data})
        return model

    pipe, plain, x = GPipe(layers(True), [2, 2], chunks=4, schedule=schedule), layers(False), X[:8]
    for _ in range(2):
        pipe.zero_grad()
        pipe.step(x, target=x, loss_fn=F.mse_loss)
    total = functools.partial(F.mse_loss, reduction="sum")
    plain_step(plain, x, x, 4, schedule, total, x.numel())
    found = {name: p.grad for name, p in pipe.named_parameters()}
    expected = {name: p.grad for name, p in plain.named_parameters()}
    expected["0.weight"] = expected.pop("2.weight") + expected["0.weight"]
    assert unequal(found, expected) == []


def test_another_batch_dimension_and_autocast() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1).float(), target.flatten(), reduction="sum")

    x, y = X[:8].expand(3, 8, WIDTH).contiguous(), Y[:8].expand(3, 8).clamp(min=0)
    for dim in (1, -2):
        pipe = GPipe(without_norm(), [1, 2], chunks=2, batch_dim=dim)
        y_of_dim = y if dim == 1 else y.unsqueeze(-1)
        with torch.autocast("cpu", torch.bfloat16):
            found, output = pipe.step(x, target=y_of_dim, loss_fn=loss, normalizer=24, return_outputs=True)
            expected = loss(pipe(x), y) / 24
            evaluated = pipe.evaluate(x, target=y_of_dim, loss_fn=loss, normalizer=24)
        torch.testing.assert_close(found, expected.detach())
        torch.testing.assert_close(evaluated, expected.detach())
        assert (output.shape, output.dtype) == ((3, 8, CLASSES), torch.bfloat16)


def test_inputs_of_a_dtype_that_autocast_does_not_concatenate() -> None:
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)).half()
    pipe = GPipe(copy.deepcopy(plain), [1, 1], devices=["cpu"] * 2, chunks=2)
    ours, expected = (X.half().requires_grad_() for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        pipe.step(ours, loss_fn=lambda y: y.float().square().sum(), normalizer=1)
        losses = [plain(c).float().square().sum() for c in expected.chunk(2)]
    for loss in reversed(losses):
        loss.backward()
    assert torch.equal(ours.grad, expected.grad)


def test_the_balance_is_measured_by_the_first_step() -> None:
    pipe = GPipe(layers(), devices=["cpu"] * 2, chunks=2)
    pipe.step(X, target=Y, loss_fn=F.cross_entropy)
    assert not balance_is_pending(pipe)
    assert sum(pipe.balance) == 8

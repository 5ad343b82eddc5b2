"""`GPipe.step` against the plain loop that adds up gradients in the order of the schedule."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", CHECKPOINT_MODES)
@pytest.mark.parametrize("chunks", [1, 2, 4, 7, 9])
@pytest.mark.parametrize("balance", [[8], [3, 5], [2, 3, 3], [2, 2, 2, 2]])
def test_a_step_equals_the_plain_loop(balance: list[int], chunks: int, mode: str, schedule: str) -> None:
    x, y = (X, Y) if chunks < 5 else (X.repeat(2, 1), Y.repeat(2))  # batch norm needs more than one sample
    plain, model = layers(), layers()
    pipe = GPipe(
        model, balance, devices=["cpu"] * len(balance), chunks=chunks, checkpoint=mode, schedule=schedule
    )
    for _ in range(2):
        ours = step(pipe, x, y)
        assert (
            unequal(ours, plain_step(plain, x, y, chunks, schedule, cross_entropy, (y != -100).sum())) == []
        )


def drawn_schedule(seed: int, num_stages: int, num_microbatches: int) -> Schedule:
    """Returns a random schedule: with one or two stages on a rank, and with or without split backwards."""
    draw = random.Random(seed)
    num_ranks = draw.choice([n for n in (num_stages, num_stages - 1, num_stages // 2) if n])
    rank_of = [draw.randrange(num_ranks) for _ in range(num_stages)]
    splits = [[draw.random() < 0.6 for _ in range(num_microbatches)] for _ in range(num_stages)]
    ranks: list[list[Action]] = [[] for _ in range(num_ranks)]
    done: set[Action] = set()

    def ready(stage: int, kind: Kind, m: int) -> bool:
        last, split = stage == num_stages - 1, splits[stage][m]
        after = {Action(stage + 1, Kind.B, m), Action(stage + 1, Kind.I, m)}
        return {
            Kind.F: (stage == 0 or Action(stage - 1, Kind.F, m) in done)
            and (m == 0 or Action(stage, Kind.F, m - 1) in done),
            Kind.B: not split and Action(stage, Kind.F, m) in done and (last or not after.isdisjoint(done)),
            Kind.I: split and Action(stage, Kind.F, m) in done and (last or not after.isdisjoint(done)),
            Kind.W: Action(stage, Kind.I, m) in done,
        }[kind]

    sizes = range(num_stages), (Kind.F, Kind.B, Kind.I, Kind.W), range(num_microbatches)
    left = [Action(*parts) for parts in itertools.product(*sizes)]
    # Connections keep the order, so that all stages run backwards in that of the last one.
    order: list[int] = []

    def is_next(action: Action) -> bool:
        if action.kind in (Kind.F, Kind.W) or action.stage == num_stages - 1:
            return True
        begun = {a.microbatch for a in done if a.stage == action.stage and a.kind in (Kind.B, Kind.I)}
        return next(m for m in order if m not in begun) == action.microbatch

    while options := [a for a in left if ready(a.stage, a.kind, a.microbatch) and is_next(a)]:
        action = draw.choice(options)
        left.remove(action)
        done.add(action)
        ranks[rank_of[action.stage]].append(action)
        if action.kind in (Kind.B, Kind.I) and action.stage == num_stages - 1:
            order.append(action.microbatch)
    return Schedule.of([row for row in ranks if row], num_microbatches)


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
    pipe = GPipe(layers(), balance, devices=["cpu"] * 4, chunks=8, schedule=schedule)
    ours = step(pipe, x, y)
    assert unequal(ours, gradients_in_order(layers(), balance, schedule, x, y, (y != -100).sum())) == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(40))
def test_a_schedule_of_the_user_equals_the_plain_loop(seed: int) -> None:
    balance = [[8], [3, 5], [2, 3, 3], [2, 2, 2, 2]][seed % 4]
    chunks, mode = (1, 2, 3, 4)[seed // 4 % 4], CHECKPOINT_MODES[seed % 3]
    schedule = drawn_schedule(seed, len(balance), chunks)
    x, y = X[:8], Y[:8]
    pipe = GPipe(
        layers(),
        balance,
        devices=["cpu"] * len(balance),
        chunks=chunks,
        checkpoint=mode,
        schedule=schedule,
    )
    for _ in range(2):
        ours = step(pipe, x, y)
    plain = layers()
    gradients_in_order(plain, balance, schedule, x, y, 7)
    assert unequal(ours, gradients_in_order(plain, balance, schedule, x, y, (y != -100).sum())) == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["eager", "auto"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layers_in_python(schedule: str, backend: str) -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if float(x.detach().sum()) > 0 else x * 3

    def with_branch() -> nn.Sequential:
        found = layers()
        found.insert(4, Branches())
        return found

    plain = with_branch()
    pipe = GPipe(with_branch(), [3, 6], devices=["cpu"] * 2, chunks=4, backend=backend, schedule=schedule)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **options: None)
        ours = step(pipe, X, Y)
    assert unequal(ours, plain_step(plain, X, Y, 4, schedule, cross_entropy, (Y != -100).sum())) == []


@pytest.mark.parametrize("backend", ["eager", "aten"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype, backend: str) -> None:
    x = X.to(dtype)
    plain = without_norm().to(dtype)
    pipe = GPipe(without_norm().to(dtype), [1, 2], devices=["cpu"] * 2, chunks=3, backend=backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **options: None)
        ours = step(pipe, x, Y)
    expected = plain_step(plain, x, Y, 3, "gpipe", cross_entropy, (Y != -100).sum())
    assert ours.pop("loss").dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
    expected.pop("loss")
    assert unequal(ours, expected) == []


WEIGHTS = torch.rand(CLASSES, generator=torch.Generator().manual_seed(3)) + 0.5
PROBABILITIES = torch.rand(9, CLASSES, generator=torch.Generator().manual_seed(4)).softmax(1)
LOSSES: dict[str, tuple[Any, Tensor]] = {
    "cross_entropy": (F.cross_entropy, Y),
    "CrossEntropyLoss with weights": (nn.CrossEntropyLoss(weight=WEIGHTS), Y),
    "smoothed": (functools.partial(F.cross_entropy, label_smoothing=0.1, weight=WEIGHTS), Y),
    "another ignored class": (nn.CrossEntropyLoss(ignore_index=2), Y.clamp(min=0)),
    "probabilities": (F.cross_entropy, PROBABILITIES),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), Y),
    "classes of a byte": (nn.CrossEntropyLoss(weight=WEIGHTS), Y.clamp(min=0).to(torch.uint8)),
    "mse_loss": (F.mse_loss, PROBABILITIES),
    "HuberLoss": (nn.HuberLoss(delta=0.3), PROBABILITIES),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), PROBABILITIES),
}


def without_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_is_that_of_the_whole(name: str) -> None:
    loss_fn, y = LOSSES[name]
    pipe, plain = GPipe(without_norm(), [1, 2], devices=["cpu"] * 2, chunks=2), without_norm()
    loss = pipe.step(X, target=y, loss_fn=loss_fn)
    expected = loss_fn(plain(X), y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_loss_of_ones_own_with_a_normalizer_and_nested_targets() -> None:
    def loss(output: Tensor, target: dict[str, Any]) -> Tensor:
        difference = (output - target["y"]).abs().sum(1)
        return (difference * target["mask"][0]).sum() * target["factor"]

    mask = (torch.arange(9) % 3 > 0).float()
    target = {"y": PROBABILITIES, "mask": [mask], "factor": 2}
    pipe, plain = GPipe(without_norm(), [1, 2], devices=["cpu"] * 2, chunks=4), without_norm()
    losses: list[Tensor] = []
    found, output = pipe.step(
        X,
        target=target,
        loss_fn=loss,
        normalizer=lambda target: target["mask"][0].sum(),
        losses=losses,
        return_outputs=True,
    )
    expected = loss(plain(X), target) / mask.sum()
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(output, plain(X).detach())
    assert not output.requires_grad
    assert len(losses) == 3
    torch.testing.assert_close(sum(losses[1:], losses[0]), found)


def test_gradients_accumulate_and_hooks_are_called() -> None:
    pipe, seen = GPipe(without_norm(), [1, 2], devices=["cpu"] * 2, chunks=2), []
    pipe.step(X, target=Y, loss_fn=F.cross_entropy)
    once = [p.grad.clone() for p in pipe.parameters()]
    for parameter in pipe.parameters():
        parameter.register_hook(lambda gradient: seen.append("tensor"))
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    pipe.step(X, target=Y, loss_fn=F.cross_entropy)
    assert all(torch.equal(p.grad, g + g) for p, g in zip(pipe.parameters(), once, strict=True))
    assert sorted(seen) == ["accumulated"] * 4 + ["tensor"] * 4


def test_the_input_gets_a_gradient() -> None:
    pipe, plain = GPipe(without_norm(), [1, 2], devices=["cpu"] * 2, chunks=2), without_norm()
    ours, theirs = X.clone().requires_grad_(), X.clone().requires_grad_()
    pipe.step(ours, target=Y, loss_fn=F.cross_entropy)
    F.cross_entropy(plain(theirs), Y).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


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

    pipe = GPipe(layers(True), [2, 2], devices=["cpu"] * 2, chunks=4, schedule=schedule)
    plain = layers(False)
    x = X[:8]
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

    pipe = GPipe(without_norm(), [1, 2], devices=["cpu"] * 2, chunks=2, batch_dim=1)
    x, y = X[:8].expand(3, 8, WIDTH).contiguous(), Y[:8].expand(3, 8).clamp(min=0)
    with torch.autocast("cpu", torch.bfloat16):
        found, output = pipe.step(x, target=y, loss_fn=loss, normalizer=24, return_outputs=True)
        expected = loss(pipe(x), y) / 24
    torch.testing.assert_close(found, expected.detach())
    assert output.shape == (3, 8, CLASSES)
    assert output.dtype == torch.bfloat16


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_is_recorded_as_one_run(schedule: str) -> None:
    pipe = GPipe(without_norm(), [1, 2], devices=["cpu"] * 2, chunks=4, schedule=schedule)
    with pipe.recording() as recording:
        pipe.step(X, target=Y, loss_fn=F.cross_entropy)
    assert {event.run for event in recording.latest.values()} == {1}
    actions = [str(event.action) for event in recording.stages[1] if not event.is_wait]
    early = actions.index("1B0" if "1B0" in actions else "1I0") < actions.index("1F2")
    assert early == (schedule != "gpipe")


def test_the_balance_is_measured_by_the_first_step() -> None:
    pipe = GPipe(layers(), devices=["cpu"] * 2, chunks=2)
    pipe.step(X, target=Y, loss_fn=F.cross_entropy)
    assert not pipe._balance_pending
    assert sum(pipe.balance) == 8


def test_functions_made_in_each_call_share_programs() -> None:
    pipe = GPipe(without_norm(), [1, 2], devices=["cpu"] * 2, chunks=2)
    for _ in range(3):
        pipe.step(X, target=Y, loss_fn=nn.CrossEntropyLoss())
        pipe.step(X, target=Y, loss_fn=lambda a, b: F.cross_entropy(a, b, reduction="sum"), normalizer=8)
    assert len(pipe._trainers) == 2


def test_settings_and_layers_may_change_between_steps() -> None:
    pipe, plain = GPipe(layers(), [3, 5], devices=["cpu"] * 2, chunks=2), layers()
    for schedule, chunks, mode in (("gpipe", 2, "always"), ("1f1b", 4, "never")):
        pipe.schedule, pipe.chunks, pipe.checkpoint = schedule, chunks, mode
        ours = step(pipe, X, Y)
        assert unequal(ours, plain_step(plain, X, Y, chunks, schedule, cross_entropy, 8)) == []
    pipe.balance = [4, 4]
    pipe.eval(), plain.eval()
    ours = step(pipe, X, Y)
    assert unequal(ours, plain_step(plain, X, Y, 4, "1f1b", cross_entropy, 8)) == []


def test_the_number_of_stages_and_a_value_for_each_may_change_between_steps() -> None:
    pipe, plain = GPipe(layers(), [3, 5], chunks=2), layers()
    for balance in ([3, 5], [2, 2, 4], [8]):
        pipe.checkpoint, pipe.balance = "never", balance
        pipe.checkpoint = [0.5] * len(balance)
        ours = step(pipe, X, Y)
        assert unequal(ours, plain_step(plain, X, Y, 2, "gpipe", cross_entropy, 8)) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_but_gpipe_keep_no_more_micro_batches_than_stages(schedule: str) -> None:
    kept: list[int] = []

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Count.apply(x)

    class Count(torch.autograd.Function):
        live = 0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            Count.live += 1
            kept.append(Count.live)
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            Count.live -= 1
            return gradient * 1

    model = nn.Sequential(nn.Linear(WIDTH, 8), Counts(), nn.Linear(8, CLASSES))
    pipe = GPipe(
        model, [2, 1], devices=["cpu"] * 2, chunks=8, checkpoint="never", backend="eager", schedule=schedule
    )
    pipe.step(X.repeat(2, 1)[:16], target=Y.repeat(2)[:16], loss_fn=F.cross_entropy)
    assert max(kept) == (8 if schedule == "gpipe" else 2)


def plain_losses(ks: list[float], model: nn.Module, x: Tensor, z: Tensor) -> list[Tensor]:
    return [k * (model(x) - z).square().sum().detach() for k in ks]


class Scaled:
    def __init__(self, k: float) -> None:
        self.k = k

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.k * (output - target).square().sum()


def with_keyword(k: float) -> Any:
    def loss(output: Tensor, target: Tensor, *, k: float = k) -> Tensor:
        return k * (output - target).square().sum()

    return loss


def in_a_loop(ks: list[float]) -> Iterator[Any]:
    """Functions that close over one variable, which has another value whenever one of them is taken."""
    made = []
    for k in ks:
        made.append(lambda output, target: k * (output - target).square().sum())  # noqa: B023 as users do
        yield made[-1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["lambda", "method", "keyword", "constant"])
def test_losses_that_differ_in_what_they_close_over_are_told_apart(kind: str) -> None:
    """Two epochs: the lambdas of the second have the variables that those of the first had."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    pipe = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=1)
    x, z = torch.randn(6, 4), torch.randn(6, 3)
    make: dict[str, Any] = {
        "lambda": in_a_loop,
        "method": lambda ks: (Scaled(k).loss for k in ks),
        "keyword": lambda ks: map(with_keyword, ks),
        "constant": lambda ks: (functools.partial(weighted_sum, k) for k in ks),
    }
    for _ in range(2):
        ks = [1.0, 10.0, True, 3]
        found = [pipe.step(x, target=z, loss_fn=f, normalizer=1) for f in make[kind](ks)]
        torch.testing.assert_close(found, plain_losses(ks, layers, x, z))


def weighted_sum(k: float, output: Tensor, target: Tensor) -> Tensor:
    return k * (output - target).square().sum()


def two_parts(output: Tensor, target: Tensor, a: float = 1.0, b: float = 1.0) -> Tensor:
    return a * (output - target).abs().sum() + b * (output - target).square().sum()


def test_names_of_a_partials_arguments_count() -> None:
    pipe = GPipe(without_norm(), [1, 2], devices=["cpu"] * 2, chunks=1)
    losses = [functools.partial(two_parts, a=1.0, b=0.0), functools.partial(two_parts, b=1.0, a=0.0)]
    found = [pipe.step(X, target=PROBABILITIES, loss_fn=f, normalizer=1) for f in losses]
    torch.testing.assert_close(found, [f(pipe(X), PROBABILITIES).detach() for f in losses])


def test_a_negative_batch_dimension() -> None:
    pipe = GPipe(without_norm(), [1, 2], devices=["cpu"] * 2, chunks=3, batch_dim=-2)
    x, z = torch.randn(5, 6, WIDTH), torch.randn(5, 6, CLASSES)
    expected = F.mse_loss(without_norm()(x), z).detach()
    for run in (pipe.step, pipe.evaluate):
        torch.testing.assert_close(run(x, target=z, loss_fn=F.mse_loss), expected)


def test_normalizers_get_the_target_itself_and_return_one_number() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    pipe = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2)
    x, z, w = torch.randn(6, 4), torch.randn(6, 3), torch.rand(3)
    leaf = torch.tensor([[2.0]], dtype=torch.float64, requires_grad=True)

    def loss(output: Tensor, target: Any) -> Tensor:
        return ((output - target[0]).square() * target[1]).sum()

    found = pipe.step(
        x, target=(z, replicate(w)), loss_fn=loss, normalizer=lambda target: target[1].sum() * leaf
    )
    assert (found.shape, found.requires_grad) == (torch.Size([]), False)
    torch.testing.assert_close(found, (loss(layers(x), (z, w)) / (2 * w.sum())).detach())

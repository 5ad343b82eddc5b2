"""Steps with an optimizer, and evaluations, against the plain loop in the order of the schedule."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils import _pytree as pytree

import gpipe_fast
from gpipe_fast import GPipe
from gpipe_fast.schedule import SCHEDULES
from tests.reference import SEED

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*stages idle")]
WIDTH, CLASSES, BATCH, CHUNKS, STEPS = 6, 5, 11, 4, 50  # micro-batches of 3, 3, 3 and 2 samples
OVERFLOW = 7  # the step in which the loss of one micro-batch is infinite, if the recipe has a scaler
Target = dict[str, Tensor]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.Dropout(0.2),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, CLASSES),
    )


def pipeline(stages: int = 2, **options: Any) -> GPipe:
    balance = {1: [6], 2: [3, 3], 3: [2, 2, 2]}[stages]
    return GPipe(layers(), balance, devices=["cpu"] * stages, chunks=CHUNKS, **options)


def weighted(output: Tensor, target: Target) -> Tensor:
    """A sum of losses of samples, each with a weight of its own."""
    return (F.cross_entropy(output, target["y"], reduction="none") * target["weight"]).sum()


def batches(steps: int = STEPS, overflow: int | None = None) -> Iterator[tuple[Tensor, Target]]:
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        x, weight = torch.randn(BATCH, WIDTH, generator=generator), torch.rand(BATCH, generator=generator)
        if step == overflow:
            weight[4] = torch.inf
        yield x, {"y": torch.randint(CLASSES, (BATCH,), generator=generator), "weight": weight}


def sum_of_weights(target: Target) -> Tensor:
    return target["weight"].sum().clamp(max=1e3)


@dataclass
class Recipe:
    """What updates the parameters.

    Attributes:
        optimizer: makes an optimizer of a model's parameters.
        scaler: makes a gradient scaler.
        max_norm: the maximum norm of gradients.
        scheduler: whether the learning rates follow a schedule.
    """

    optimizer: Callable[[nn.Module], Optimizer]
    scaler: Callable[[], GradScaler | None] = field(default=lambda: None)
    max_norm: float | None = None
    scheduler: bool = False


def scaler() -> GradScaler:
    """A scaler whose scale is no power of two, so that the order of products shows, and which grows."""
    return GradScaler("cpu", init_scale=3000.0, growth_interval=5)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def two_groups(model: nn.Module) -> Optimizer:
    *rest, last = model.children()
    before = [p for layer in rest for p in layer.parameters()]
    groups = [{"params": before, "lr": 1e-3}, {"params": last.parameters(), "weight_decay": 0.3}]
    return AdamW(groups, lr=1e-2)


RECIPES = {
    "AdamW": Recipe(adamw),
    "SGD with momentum": Recipe(sgd),
    "clipping": Recipe(sgd, max_norm=0.3),
    "scaler": Recipe(adamw, scaler),
    "scaler and clipping": Recipe(sgd, scaler, max_norm=0.3),
    "scaler and fused AdamW": Recipe(lambda model: AdamW(model.parameters(), lr=1e-2, fused=True), scaler),
    "disabled scaler": Recipe(sgd, lambda: GradScaler("cpu", enabled=False), max_norm=0.3),
    "two groups and a scheduler": Recipe(two_groups, scheduler=True),
    "everything": Recipe(two_groups, scaler, max_norm=0.3, scheduler=True),
}


class Training:
    """50 steps by a recipe.

    Attributes:
        state: losses, parameters, gradients, buffers, and the state of optimizer and scaler, by name.
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.model, self.recipe = model, recipe
        self.optimizer, self.scaler = recipe.optimizer(model), recipe.scaler()
        self.state: dict[str, Any] = {}

    def run(self, step: Callable[[Training, Tensor, Target], Tensor]) -> dict[str, Any]:
        recipe = self.recipe
        scheduler = CosineAnnealingLR(self.optimizer, STEPS) if recipe.scheduler else None
        scales = self.scaler is not None and self.scaler.is_enabled()
        torch.manual_seed(SEED)
        for index, (x, target) in enumerate(batches(overflow=OVERFLOW if scales else None)):
            self.optimizer.zero_grad()
            self.state[f"loss of step {index}"] = step(self, x, target)
            if scheduler is not None:
                scheduler.step()
        self.state |= {f"gradient of {name}": p.grad for name, p in self.model.named_parameters()}
        self.state |= self.model.state_dict()
        found = [self.optimizer.state_dict(), None if self.scaler is None else self.scaler.state_dict()]
        return self.state | {f"state {i}": leaf for i, leaf in enumerate(pytree.tree_leaves(found))}


def plain_step(training: Training, losses: list[Tensor], schedule: str) -> Tensor:
    """The end of a plain step: backwards in the order of the schedule, and the update."""
    plain_backward(training, losses, schedule)
    recipe, optimizer, scaler = training.recipe, training.optimizer, training.scaler
    if recipe.max_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, recipe.max_norm)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return total(losses)


def plain_backward(training: Training, losses: list[Tensor], schedule: str = "gpipe") -> None:
    scaler = training.scaler
    for loss in reversed(losses) if schedule == "gpipe" else losses:
        (loss if scaler is None else scaler.scale(loss)).backward()


def plain_forward(
    model: nn.Module, x: Tensor, target: Target, chunks: int = CHUNKS
) -> tuple[list[Tensor], Tensor]:
    """Returns the losses of the micro-batches, and the output of the mini-batch."""
    divisor = sum_of_weights(target)
    with gpipe_fast.keyed_rng(model):
        outputs = [model(part) for part in x.chunk(chunks)]
    targets = zip(target["y"].chunk(chunks), target["weight"].chunk(chunks), strict=True)
    pairs = zip(outputs, targets, strict=True)
    return [weighted(out, {"y": y, "weight": w}) / divisor for out, (y, w) in pairs], torch.cat(outputs)


def total(losses: list[Tensor]) -> Tensor:
    return sum(losses[1:], losses[0]).detach()


def unequal(ours: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    assert ours.keys() == expected.keys()
    return [name for name, value in ours.items() if not same(value, expected[name])]


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(123.0), b.nan_to_num(123.0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer_in", ["end", "drain"])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", RECIPES)
def test_50_steps_equal_those_of_the_plain_loop(
    name: str, schedule: str, stages: int, optimizer_in: str
) -> None:
    recipe = RECIPES[name]

    def step(training: Training, x: Tensor, target: Target) -> Tensor:
        found: Tensor = training.model.step(  # type: ignore[operator]
            x,
            target=target,
            loss_fn=weighted,
            normalizer=sum_of_weights,
            optimizer=training.optimizer,
            scaler=training.scaler,
            max_norm=recipe.max_norm,
            optimizer_in=optimizer_in,
        )
        return found

    def plain(training: Training, x: Tensor, target: Target) -> Tensor:
        return plain_step(training, plain_forward(training.model, x, target)[0], schedule)

    ours = Training(pipeline(stages, schedule=schedule), recipe)
    expected = Training(layers(), recipe)
    found = ours.run(step)
    assert unequal(found, expected.run(plain)) == []
    if recipe.scaler is scaler:
        assert found[f"loss of step {OVERFLOW}"] == torch.inf
        assert ours.scaler is not None
        assert 3000 < ours.scaler.get_scale() < 3000 * 2**9  # it grew, and was halved once


class Net(nn.Module):
    """A model that is no `nn.Sequential`, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return {"loss": F.cross_entropy(x, labels), "logits": x}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["AdamW", "clipping", "scaler and clipping"])
def test_50_steps_of_a_model_that_is_not_sequential(name: str, schedule: str) -> None:
    recipe = RECIPES[name]

    def inputs(x: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        return x * target["weight"][:, None].clamp(max=1e30), target["y"]

    def step(training: Training, x: Tensor, target: Target) -> Tensor:
        x, labels = inputs(x, target)
        options = {"optimizer": training.optimizer, "scaler": training.scaler, "max_norm": recipe.max_norm}
        options["optimizer_in"] = "drain"
        found: Tensor = training.model.step(x, labels=labels, **options)  # type: ignore[operator]
        return found

    def plain(training: Training, x: Tensor, target: Target) -> Tensor:
        x, labels = inputs(x, target)
        parts = zip(x.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True)
        losses = [training.model(a, b)["loss"] * (len(b) / BATCH) for a, b in parts]
        return plain_step(training, losses, schedule)

    example = {"x": torch.randn(BATCH, WIDTH), "labels": torch.zeros(BATCH, dtype=torch.int64)}
    model = GPipe.from_model(
        Net(), kwargs=example, balance=[2, 1], devices=["cpu"] * 2, chunks=CHUNKS, schedule=schedule
    )
    expected = Training(Net(), recipe).run(plain)
    assert unequal(Training(model, recipe).run(step), expected) == []


X, TARGET = next(batches(1))
STEP: dict[str, Any] = {"target": TARGET, "loss_fn": weighted, "normalizer": sum_of_weights}


def test_scaled_gradients_accumulate_until_the_update() -> None:
    recipe = Recipe(sgd, scaler, max_norm=0.3)
    ours, plain = Training(pipeline(), recipe), Training(layers(), recipe)
    ours.model.chunks = 1
    torch.manual_seed(SEED)
    first = ours.model.step(X, **STEP, scaler=ours.scaler)
    options = {"optimizer": ours.optimizer, "scaler": ours.scaler, "max_norm": recipe.max_norm}
    second = ours.model.step(X, **STEP, **options)
    torch.manual_seed(SEED)
    losses, _ = plain_forward(plain.model, X, TARGET, chunks=1)
    plain_backward(plain, losses)
    assert torch.equal(first, total(losses))
    losses, _ = plain_forward(plain.model, X, TARGET, chunks=1)
    assert torch.equal(second, plain_step(plain, losses, "gpipe"))
    assert unequal(dict(ours.model.state_dict()), dict(plain.model.state_dict())) == []


def test_a_step_that_fails_updates_nothing() -> None:
    pipe = pipeline(schedule="1f1b")
    optimizer, own = adamw(pipe), scaler()
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    pipe._pipeline.inject_faults(faults=[("0B2", 0, "RuntimeError")])
    losses: list[Tensor] = []
    with pytest.raises(RuntimeError, match="injected"):
        pipe.step(X, **STEP, optimizer=optimizer, scaler=own, max_norm=1.0, losses=losses)
    pipe._pipeline.inject_faults()
    assert unequal(dict(pipe.state_dict()), before) == []
    assert (losses, optimizer.state_dict()["state"], own.get_scale()) == ([], {}, 3000)
    assert all(p.grad is None for p in pipe.parameters())
    pipe.step(X, **STEP, optimizer=optimizer, scaler=own, max_norm=1.0, losses=losses)
    assert len(losses) == CHUNKS


def test_an_optimizer_that_raises_leaves_the_gradients() -> None:
    pipe, other = pipeline(), pipeline()
    optimizer, losses = sgd(pipe), []

    def refuse(*args: Any) -> None:
        raise KeyError("refused")

    optimizer.register_step_pre_hook(refuse)
    torch.manual_seed(SEED)
    with pytest.raises(KeyError, match="refused"):
        pipe.step(X, **STEP, optimizer=optimizer, losses=losses)
    torch.manual_seed(SEED)
    other.step(X, **STEP)
    assert losses == []
    for ours, theirs in zip(pipe.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
        assert torch.equal(ours, theirs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_an_evaluation_equals_the_plain_loop(stages: int, backend: str, training: bool) -> None:
    pipe, plain = pipeline(stages, backend=backend).train(training), layers().train(training)
    losses: list[Tensor] = []
    torch.manual_seed(SEED)
    found, output = pipe.evaluate(X, **STEP, losses=losses, return_outputs=True)
    random_state = torch.get_rng_state()
    torch.manual_seed(SEED)
    assert torch.equal(random_state, torch.get_rng_state()) == (not training)
    with torch.no_grad():
        expected, outputs = plain_forward(plain, X, TARGET)
    assert torch.equal(found, total(expected))
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert torch.equal(output, outputs)
    assert unequal(dict(pipe.named_buffers()), dict(plain.named_buffers())) == []
    assert not any(x.requires_grad for x in (found, output, *losses))
    assert all(p.grad is None for p in pipe.parameters())


def test_evaluations_between_steps_change_nothing() -> None:
    def trained(evaluates: bool) -> dict[str, Tensor]:
        pipe = pipeline(schedule="1f1b")
        optimizer = sgd(pipe)
        torch.manual_seed(SEED)
        for x, target in batches(4):
            optimizer.zero_grad()
            options: dict[str, Any] = {**STEP, "target": target}
            pipe.step(x, **options, optimizer=optimizer)
            gradients = [p.grad.clone() for p in pipe.parameters()]
            if evaluates:
                pipe.eval().evaluate(x, **options)
                with torch.inference_mode():
                    pipe.evaluate(x, **options)
                pipe.train()
            assert all(torch.equal(p.grad, g) for p, g in zip(pipe.parameters(), gradients, strict=True))
        return dict(pipe.state_dict())

    assert unequal(trained(evaluates=True), trained(evaluates=False)) == []


@pytest.mark.parametrize("frozen", [False, True])
def test_an_evaluation_runs_forwards_alone(frozen: bool) -> None:
    pipe = pipeline(stages=3).requires_grad_(not frozen)
    with pipe.recording() as recording:
        pipe.evaluate(X, **STEP)
    kinds = {event.action.kind.value for stage in recording.stages for event in stage}
    assert kinds == {"F", "SEND_F", "RECV_F"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_an_evaluation_that_fails_changes_nothing(backend: str) -> None:
    pipe = pipeline(backend=backend)
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    pipe._pipeline.inject_faults(faults=[("1F2", 0, "RuntimeError")])
    with pytest.raises(RuntimeError, match="injected"):
        pipe.evaluate(X, **STEP)
    pipe._pipeline.inject_faults()
    assert unequal(dict(pipe.state_dict()), before) == []
    pipe.evaluate(X, **STEP)


class Shared(nn.Module):
    """A linear layer that uses a weight of another."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.weight = other.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_drained_updates_of_all_kinds_of_parameters(optimizer: Callable[[nn.Module], Optimizer]) -> None:
    """Parameters of one stage, of two, of no layer's forward, and of another module."""

    def trained(optimizer_in: str) -> dict[str, Any]:
        torch.manual_seed(0)
        first, unused, other = nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2), nn.Linear(3, 3)
        second = nn.Linear(WIDTH, CLASSES)
        second.add_module("unused", unused)
        pipe = GPipe(nn.Sequential(first, nn.Tanh(), Shared(first), second), [2, 2], chunks=CHUNKS)
        update = optimizer(nn.ModuleList([pipe, other]))
        for x, target in batches(4):
            update.zero_grad()
            unused.weight.grad = torch.ones(2, 2)
            other(torch.ones(3)).sum().backward()
            options: dict[str, Any] = {**STEP, "target": target}
            pipe.step(x, **options)  # gradients accumulate
            pipe.step(x, **options, optimizer=update, optimizer_in=optimizer_in)
        found = [update.state_dict(), other.state_dict(), [p.grad for p in pipe.parameters()]]
        return dict(pipe.state_dict()) | {f"{i}": leaf for i, leaf in enumerate(pytree.tree_leaves(found))}

    assert unequal(trained("drain"), trained("end")) == []


class WaitsForUpdate(torch.autograd.Function):
    """In the backward of micro-batch 0, the last one, waits until a parameter was changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        layer = ctx.layer
        layer.num_backwards += 1
        end = time.monotonic() + 60
        while layer.num_backwards == CHUNKS and layer.watched[0]._version == layer.version:
            assert time.monotonic() < end, "the last stage was not updated before this one's backward ended"
            time.sleep(0.001)
        return gradient, None


class Waiting(nn.Module):
    def __init__(self, watched: nn.Parameter) -> None:
        super().__init__()
        self.watched, self.version, self.num_backwards = (watched,), watched._version, 0

    def forward(self, x: Tensor) -> Tensor:
        return WaitsForUpdate.apply(x, self)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_stage_updates_while_another_runs_its_backward(schedule: str) -> None:
    torch.manual_seed(0)
    last = nn.Linear(WIDTH, CLASSES)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Waiting(last.weight), last)
    pipe = GPipe(model, [2, 1], chunks=CHUNKS, backend="eager", schedule=schedule)
    with pipe.recording() as recording:
        pipe.step(X, **STEP, optimizer=sgd(pipe), optimizer_in="drain")
    updates = [str(e.action) for stage in recording.stages for e in stage if e.action.kind.value == "U"]
    assert updates == ["0U0", "1U0"]
    assert "bubble" in str(recording)


class Refusing(SGD):
    """An optimizer of torch.optim, as far as its class tells, that fails at a parameter."""

    def step(self, closure: Any = None) -> None:
        if any(p.shape == (WIDTH, WIDTH) for group in self.param_groups for p in group["params"]):
            raise KeyError("refused")
        super().step()


@pytest.mark.parametrize("where", ["update", "backward"])
def test_a_failure_in_the_drain_names_the_updated_stages(where: str) -> None:
    torch.manual_seed(0)
    last = nn.Linear(WIDTH, CLASSES)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Waiting(last.weight), last)
    pipe = GPipe(model, [2, 1], chunks=CHUNKS, backend="eager", schedule="1f1b")
    before = [p.detach().clone() for p in pipe.parameters()]
    if where == "update":
        optimizer: Optimizer = Refusing(pipe.parameters(), lr=0.1)
        Refusing.__module__ = "torch.optim.refusing"
    else:
        optimizer = sgd(pipe)
        pipe._pipeline.inject_faults(faults=[("0B3", 0, "RuntimeError")])
    with pytest.raises((KeyError, RuntimeError), match=r"refused|injected") as raised:
        pipe.step(X, **STEP, optimizer=optimizer, optimizer_in="drain")
    if hasattr(raised.value, "__notes__"):
        assert "the parameters of stages [1] are updated already" in raised.value.__notes__[-1]
    after = [torch.equal(p, b) for p, b in zip(pipe.parameters(), before, strict=True)]
    assert after == [True, True, False, False]


def test_the_advised_closure_of_lbfgs_trains_like_the_plain_loop() -> None:
    def train(model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        x, target = next(batches(1))

        def closure() -> Tensor:
            optimizer.zero_grad()
            return loss_of(x, target["y"])

        optimizer.step(closure)  # type: ignore[arg-type]
        return [p.detach().clone() for p in model.parameters()]

    def plain(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(loop(x), y)
        loss.backward()
        return loss

    torch.manual_seed(0)
    loop = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    pipe = GPipe(copy.deepcopy(loop), [2, 1], chunks=CHUNKS)
    found = train(pipe, lambda x, y: pipe.step(x, target=y, loss_fn=F.cross_entropy))
    for ours, wanted in zip(found, train(loop, plain), strict=True):
        torch.testing.assert_close(ours, wanted)

"""Steps with an optimizer, and evaluations, against the plain loop in the order of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from tests.contracts.contract_1_same_bits.test_steps import CLASSES, WIDTH, layers
from tests.reference import SEED

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*stages idle")]
BATCH, CHUNKS, STEPS = 11, 4, 10  # micro-batches of 3, 3, 3 and 2 samples
OVERFLOW = 5  # the step in which the loss of one micro-batch is infinite, if the recipe has a scaler
MAX_NORM = 0.3
Target = dict[str, Tensor]


def pipeline(stages: int = 2, **options: Any) -> GPipe:
    return GPipe(layers(), {1: [8], 2: [3, 5], 3: [2, 3, 3]}[stages], chunks=CHUNKS, **options)


def weighted(output: Tensor, target: Target) -> Tensor:
    """A sum of losses of samples, each with a weight of its own."""
    return (F.cross_entropy(output, target["y"], reduction="none") * target["weight"]).sum()


def sum_of_weights(target: Target) -> Tensor:
    return target["weight"].sum().clamp(max=1e3)


def batches(steps: int = STEPS, overflow: int | None = None) -> Iterator[tuple[Tensor, Target]]:
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        x, weight = torch.randn(BATCH, WIDTH, generator=generator), torch.rand(BATCH, generator=generator)
        if step == overflow:
            weight[4] = torch.inf
        yield x, {"y": torch.randint(CLASSES, (BATCH,), generator=generator), "weight": weight}


X, TARGET = next(batches(1))
STEP: dict[str, Any] = {"target": TARGET, "loss_fn": weighted, "normalizer": sum_of_weights}


def scaler(enabled: bool = True) -> GradScaler:
    """A scaler whose scale is no power of two, so that the order of products shows, and which grows."""
    return GradScaler("cpu", init_scale=3000.0, growth_interval=3, enabled=enabled)


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2, **options)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def two_groups(model: nn.Module) -> Optimizer:
    *rest, last = model.children()
    before = [p for layer in rest for p in layer.parameters()]
    groups = [{"params": before, "lr": 1e-3}, {"params": last.parameters(), "weight_decay": 0.3}]
    return AdamW(groups, lr=1e-2)


# Of each: the optimizer of a model's parameters, the scaler, and whether gradients are clipped.
Recipe = tuple[Callable[[nn.Module], Optimizer], Callable[[], GradScaler | None], bool]
RECIPES: dict[str, Recipe] = {
    "AdamW": (adamw, lambda: None, False),
    "clipping": (sgd, lambda: None, True),
    "scaler": (adamw, scaler, False),
    "scaler and clipping": (sgd, scaler, True),
    "scaler and fused AdamW": (lambda model: adamw(model, fused=True), scaler, False),
    "disabled scaler": (sgd, lambda: scaler(enabled=False), True),
    "two groups": (two_groups, scaler, True),
}
Step = Callable[[nn.Module, Tensor, Target, Optimizer | None, GradScaler | None], Tensor]


def train(model: nn.Module, recipe: Recipe, step: Step) -> dict[str, Any]:
    """Returns losses, parameters, gradients, buffers, and the state of optimizer and scaler, by name.

    Every third update adds to the gradients of a step without one.
    """
    optimizer, own_scaler = recipe[0](model), recipe[1]()
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    scales = own_scaler is not None and own_scaler.is_enabled()
    state: dict[str, Any] = {}
    torch.manual_seed(SEED)
    for index, (x, target) in enumerate(batches(overflow=OVERFLOW if scales else None)):
        optimizer.zero_grad()
        if index % 3 == 1:
            step(model, x, target, None, own_scaler)
        state[f"loss of step {index}"] = step(model, x, target, optimizer, own_scaler)
        scheduler.step()
    state |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    found = [optimizer.state_dict(), None if own_scaler is None else own_scaler.state_dict()]
    return state | model.state_dict() | {f"state {i}": v for i, v in enumerate(pytree.tree_leaves(found))}


def plain_forward(model: nn.Module, x: Tensor, target: Target) -> tuple[list[Tensor], Tensor]:
    """Returns the losses of the micro-batches, and the output of the mini-batch."""
    divisor = sum_of_weights(target)
    with gpipe_fast.keyed_rng(model):
        outputs = [model(part) for part in x.chunk(CHUNKS)]
    targets = zip(target["y"].chunk(CHUNKS), target["weight"].chunk(CHUNKS), strict=True)
    pairs = zip(outputs, targets, strict=True)
    return [weighted(out, {"y": y, "weight": w}) / divisor for out, (y, w) in pairs], torch.cat(outputs)


def total(losses: list[Tensor]) -> Tensor:
    return sum(losses[1:], losses[0]).detach()


def plain_step_of(schedule: str, clips: bool) -> Step:
    """Returns a plain step: backwards in the order of the schedule, and the update."""

    def step(
        model: nn.Module, x: Tensor, target: Target, optimizer: Optimizer | None, own: GradScaler | None
    ) -> Tensor:
        losses, _ = plain_forward(model, x, target)
        before = [(p, p.grad) for p in model.parameters()]
        model.zero_grad()
        for loss in reversed(losses) if schedule == "gpipe" else losses:
            (loss if own is None else own.scale(loss)).backward()
        for p, gradient in before:
            p.grad = p.grad if gradient is None else gradient + p.grad
        if optimizer is not None:
            if clips:
                if own is not None:
                    own.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            if own is None:
                optimizer.step()
            else:
                own.step(optimizer)
                own.update()
        return total(losses)

    return step


def unequal(ours: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    assert ours.keys() == expected.keys()
    return [name for name, value in ours.items() if not same(value, expected[name])]


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(123.0), b.nan_to_num(123.0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", RECIPES)
def test_steps_equal_those_of_the_plain_loop(name: str, schedule: str, stages: int) -> None:
    recipe = RECIPES[name]
    clips = recipe[2]

    def step(
        model: Any, x: Tensor, target: Target, optimizer: Optimizer | None, own: GradScaler | None
    ) -> Tensor:
        options: dict[str, Any] = {**STEP, "target": target, "scaler": own}
        if optimizer is not None:
            options |= {"optimizer": optimizer} | ({"max_norm": MAX_NORM} if clips else {})
        found: Tensor = model.step(x, **options)
        return found

    found = train(pipeline(stages, schedule=schedule), recipe, step)
    assert unequal(found, train(layers(), recipe, plain_step_of(schedule, clips))) == []
    if recipe[1] is scaler:
        assert found[f"loss of step {OVERFLOW}"] == torch.inf
        # The scale grew before the overflow and after it, which halved it.
        assert 6000.0 in [v for v in found.values() if isinstance(v, float)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize("stages", [1, 3])
def test_an_evaluation_equals_the_plain_loop(stages: int, backend: str, training: bool) -> None:
    pipe, plain = pipeline(stages, backend=backend).train(training), layers().train(training)
    gradients = [torch.randn_like(p) for p in pipe.parameters()]
    for p, gradient in zip(pipe.parameters(), gradients, strict=True):
        p.grad = gradient.clone()
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
    assert all(torch.equal(p.grad, g) for p, g in zip(pipe.parameters(), gradients, strict=True))


def test_an_evaluation_runs_forwards_alone() -> None:
    pipe = pipeline(stages=3)
    with pipe.recording() as recording:
        pipe.evaluate(X, **STEP)
    kinds = {event.action.kind.value for stage in recording.stages for event in stage}
    assert kinds == {"F", "SEND_F", "RECV_F"}

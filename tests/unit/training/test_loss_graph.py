"""What of a loss is a share of a micro-batch, and what its measures are; and what is refused, by its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.layers.structure import flatten
from gpipe_fast.trace.dynamo import Refused
from gpipe_fast.training.loss_graph import MAX_MEASURES, MixesSamples, fill_measures
from gpipe_fast.training.losses import LossShares, UserLoss

CPU = torch.device("cpu")
OUTPUT = torch.linspace(-2, 2, 50, dtype=torch.float64).view(10, 5).sin()
TARGET = OUTPUT.flip(0).cos()
COLUMN = TARGET[:, :1]
CLASSES = torch.tensor([0, 1, 2, -100, 4, 0, -100, 1, 3, 3])


def shares_of(loss_fn: Any, target: Tensor, dim: int | None = 0) -> Any:
    shares: Any = LossShares(UserLoss(loss_fn, flatten(target)[1]), [dim], 0, CPU)
    shares.prepare(OUTPUT.requires_grad_(), [target])
    return shares


def total(shares: LossShares, target: Tensor, sizes: tuple[int, ...], whole: Tensor = OUTPUT) -> Tensor:
    """Returns the sum of the shares of micro-batches of these sizes."""
    assert shares.analysis is not None
    measures = shares.analysis.measures([target], len(whole))
    vector = torch.zeros(MAX_MEASURES, dtype=torch.float64)
    fill_measures(vector, len(whole), measures)
    parts = zip(whole.split(sizes), target.split(sizes), strict=True)
    return sum((shares(output, [own], vector) for output, own in parts), torch.zeros(()))


def ignored_in_place(target: Tensor) -> Tensor:
    target = target.clone()
    target[target == 4] = -100
    target.masked_fill_(target == 0, -100)
    return target


def positions(y: Tensor) -> Tensor:
    return torch.arange(len(y), device=y.device)


def set_at_targets(y: Tensor, t: Tensor) -> Tensor:
    found = torch.zeros(len(y), 5)
    found[positions(y), t.clamp(min=0)] = 1.0
    return found


def put_at_targets(y: Tensor, t: Tensor) -> Tensor:
    return torch.zeros(len(y), 5).to(y).index_put((positions(y), t.clamp(min=0)), torch.ones(()).to(y))


def padded(y: Tensor, t: Tensor) -> Tensor:
    mask = torch.arange(y.shape[1]) >= t[:, 0, None]
    return (y * mask).sum() / mask.sum()


def ones_like(y: Tensor, t: Tensor) -> Tensor:
    mask = torch.ones_like(y).cumsum(1) >= t[:, :1]
    return (y * mask).sum() / mask.sum()


def with_columns(y: Tensor, t: Tensor) -> Tensor:
    rows = positions(y).unsqueeze(1)
    return (y[rows, t.abs().argsort(1)] * t[rows.expand(-1, 5), torch.arange(5)]).mean()


# The loss, its target, and the number of measures.
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, int]] = {
    "a mean": (lambda y, t: (y - t).square().mean(), TARGET, 1),
    "a sum": (lambda y, t: (y - t).square().sum(), TARGET, 1),
    "by the length": (lambda y, t: (y - t).square().sum() / len(y), TARGET, 1),
    "by the length less one": (lambda y, t: (y - t).square().sum() / (len(y) - 1), TARGET, 1),
    "by the number of elements": (lambda y, t: (y - t).abs().sum() / y.numel(), TARGET, 1),
    "times the length": (lambda y, t: (y - t).square().mean() * len(y), TARGET, 1),
    "by half the length": (lambda y, t: (y - t).square().sum() / (len(y) / 2), TARGET, 1),
    "counted": (lambda y, t: F.cross_entropy(y, t), CLASSES, 2),
    "by a number of targets": (lambda y, t: (y * (t > 0)).sum() / ((t > 0).sum() + 1e-3), TARGET, 2),
    "several": (lambda y, t: F.cross_entropy(y, t) + 0.1 * y.square().mean() + 3, CLASSES, 2),
    "weights of the batch": (lambda y, t: (y.square() * (t / t.sum())).sum(), TARGET, 2),
    "joined": (lambda y, t: torch.stack([y.mean(), (y * t).sum(), y.new_ones(())]).sum() / 2, TARGET, 1),
    "selected": (lambda y, t: (y - t)[t > 0].square().mean(), TARGET, 2),
    "per column": (lambda y, t: ((y - t).square().mean(0) * torch.arange(5.0)).sum(), TARGET, 1),
    "added in place": (lambda y, t: (lambda a: a + a.add_(y.sum()))(y.mean()), TARGET, 1),
    "ignored in place": (lambda y, t: F.cross_entropy(y, ignored_in_place(t)), CLASSES, 2),
    "products": (lambda y, t: (y.T @ t).trace(), TARGET, 1),
    "chosen": (lambda y, t: y[positions(y), t.clamp(min=0)].square().mean(), CLASSES, 1),
    "chosen of columns": (lambda y, t: y.T[t.clamp(min=0), positions(y).int()].square().sum(), CLASSES, 1),
    "by the root of the length": (lambda y, t: (y - t).square().sum() / len(y) ** 0.5, TARGET, 1),
    "quantiles of rows": (lambda y, t: y.quantile(0.3, dim=1).sum(), TARGET, 1),
    "chosen of rows": (with_columns, TARGET, 1),
    "set": (lambda y, t: (y * set_at_targets(y, t)).sum() / len(y), CLASSES, 1),
    "put": (lambda y, t: (y * put_at_targets(y, t)).mean(), CLASSES, 1),
    "put in place, with sizes of outputs": (
        lambda y, t: (y * y.new_zeros(y.shape).index_put_((positions(y), t), y.new_ones(()))).mean(),
        CLASSES.clamp(min=0),
        1,
    ),
    "a sum of positions": (lambda y, t: y.mean() * positions(y).sum(), TARGET, 2),
    "equal for all samples": (lambda y, t: (y[:, 0] * torch.ones(len(y)) * 3).mean(), TARGET, 1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_shares_of_unequal_micro_batches_add_up(name: str) -> None:
    loss_fn, target, num_measures = LOSSES[name]
    shares = shares_of(loss_fn, target)
    assert len(shares.analysis.split.are_sums) == num_measures
    assert all(shares.analysis.split.are_sums)
    expected = loss_fn(OUTPUT, target)
    for sizes in ((10,), (5, 5), (1, 8, 1), (2, 2, 2, 4)):
        torch.testing.assert_close(total(shares, target, sizes), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["a mean", "counted", "by the length", "several"])
def test_numbers_of_samples_are_not_rounded_to_few_bits(name: str, dtype: torch.dtype) -> None:
    loss_fn, target, _ = LOSSES[name]
    target = target if target is CLASSES else target.to(dtype)
    output = OUTPUT.detach().to(dtype)
    shares: Any = LossShares(UserLoss(loss_fn, flatten(target)[1]), [0], 0, CPU)
    shares.prepare(output, [target])
    exact = loss_fn(output.float(), target if target is CLASSES else target.float())
    found = total(shares, target, (3, 7), output)
    torch.testing.assert_close(found.float(), exact, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_a_sum_of_losses_in_float16_does_not_overflow() -> None:
    output, target = torch.full((3000, 2), 20.0, dtype=torch.float16), torch.zeros(3000, dtype=torch.long)
    output[:, 0] = -20
    shares: Any = LossShares(UserLoss(F.cross_entropy, flatten(target)[1]), [0], 0, CPU)
    shares.prepare(output, [target])
    torch.testing.assert_close(total(shares, target, (2000, 1000), output).float(), torch.tensor(40.0))


def test_a_number_of_targets_that_is_no_sum_is_marked() -> None:
    shares = shares_of(lambda y, t: y.sum() / t.max(), TARGET)
    assert shares.analysis.split.are_sums == (True, False)
    torch.testing.assert_close(total(shares, TARGET, (3, 7)), OUTPUT.sum() / TARGET.max())


COMPUTES_WITH_POSITIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as weights": lambda y, t: (y[:, 0] * positions(y)).mean(),
    "in a product": lambda y, t: torch.dot(y[:, 0], positions(y).to(y)) / len(y),
    "compared": lambda y, t: torch.where(positions(y) > 7, y[:, 0], y[:, 1]).mean(),
    "put": lambda y, t: y[:, 0].index_put(((t[:, 0] > 0).long(),), positions(y).to(y)).mean(),
    "as classes": lambda y, t: F.cross_entropy(y, positions(y) % 5),
    "in one hot": lambda y, t: (y * F.one_hot(positions(y) % 5, 5)).mean(),
    "reversed": lambda y, t: (y * t[positions(y).flip(0)]).mean(),
    "downwards": lambda y, t: (y * t[torch.arange(len(y) - 1, -1, -1)]).mean(),
    "rotated": lambda y, t: (y * t[(positions(y) + 1) % len(y)]).mean(),
    "every other": lambda y, t: y[torch.arange(0, len(y), 2)].mean(),
    "counted": lambda y, t: (y[:, 0] * torch.ones(len(y)).cumsum(0)).mean(),
}
# Each has rows besides those of samples, which a sum over micro-batches would count several times.
WITH_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "joined behind": lambda y: torch.cat([y, y.new_ones(1, 5)]),
    "joined before": lambda y: torch.cat([y.new_ones(2, 5), y]),
    "padded": lambda y: F.pad(y, (0, 0, 0, 1), value=3.0),
    "padded and cut": lambda y: F.pad(y, (0, 0, 0, 1), value=3.0)[1:],
    "left out": lambda y: y[1:],
}
REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "root": (lambda y, t: F.mse_loss(y, t).sqrt(), "sqrt .*: it is not linear in what is added up"),
    "product of shares": (lambda y, t: y.mean() * t.mean() * y.sum(), "mul .*: it is not linear"),
    "largest": (lambda y, t: (y - t).max(), "max .*: it combines samples otherwise than by a sum or a mean"),
    "centred": (
        lambda y, t: (y - y.mean(0)).abs().sum(),
        "sub .*: it combines each sample with a value of all",
    ),
    "pairs": (lambda y, t: (y @ t.T).sum(), "matmul .*: it compares samples with each other"),
    "divided by outputs": (lambda y, t: t.sum() / y.sum(), "truediv .*: it is not linear"),
    "order": (lambda y, t: (y - y.flip(0)).abs().mean(), "`: it mixes samples"),
    "too many": (
        lambda y, t: (y / t.mean(0)).sum(),
        "mean .*: it computes more than 63 numbers of all targets",
    ),
    "the first five": (
        lambda y, t: (y * torch.ones(len(y), 1).triu(-4)).sum(),
        "^on random numbers, what it gives for parts of a mini-batch does not add up to what it gives",
    ),
    "one sample": (lambda y, t: (y[0] * t[0]).sum(), "getitem .*: it combines samples otherwise"),
    "many samples": (
        lambda y, t: y.sum() if len(y) > 500 else y.mean(),
        "its Python code decides by the number of samples",
    ),
    "bounded by the length": (
        lambda y, t: y.clamp(max=len(y)).sum(),
        "clamp .*: it computes each sample with the number of all samples",
    ),
    "rounded": (lambda y, t: y.sum().to(torch.int64) * 1.0, "to .*: it rounds what is added up"),
    **{
        f"positions, {name}": (loss_fn, "it computes with the positions of samples")
        for name, loss_fn in COMPUTES_WITH_POSITIONS.items()
    },
    **{
        f"rows {name}, {kind}": (
            lambda y, t, rows=rows, kind=kind: getattr(rows(y), kind)(),
            "not as many for each sample",
        )
        for name, rows in WITH_ROWS.items()
        for kind in ("sum", "mean")
    },
    "others by position": (
        lambda y, t: torch.cat([y, y]).repeat_interleave(2, 0)[positions(y)].mean(),
        "what it computes for a sample depends on its position, or on their number",
    ),
    "selected by outputs": (lambda y, t: y[y > 0].mean(), "what it is divided by follows from outputs"),
    "sizes of outputs": (padded, "sum .*: it computes a number of all targets with a size of outputs"),
    "ones like outputs": (ones_like, "sum .*: it computes a number of all targets with a size of outputs"),
    "branch": (
        lambda y, t: y.sum() if len(y) > 4 else y.mean(),
        "its Python code decides by the number of samples",
    ),
}


def changed_view(y: Tensor, t: Tensor) -> Tensor:
    a = (y - t).square().sum(0)
    b = a.view(-1)
    a.mul_(1 + (t > 0.5).sum())
    return b.sum()


def changed_target(y: Tensor, t: Tensor) -> Tensor:
    t.masked_fill_(t > 0.5, 0)
    return (y * t).sum()


def filled(y: Tensor, t: Tensor) -> Tensor:
    smooth = torch.zeros_like(y)
    smooth.fill_(0.1)
    return (y * smooth).mean()


def written_share(y: Tensor, t: Tensor) -> Tensor:
    found = torch.zeros(2)
    found[0] = (y.abs() - 6).relu().mean()
    return found.sum() + y.square().mean()


def last_set(y: Tensor) -> Tensor:
    found = y.clone()
    found[-1] = 0
    return found


# Each computes with the positions or the number of samples; where targets exceed 9, so that this is hidden.
BY_POSITION: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a triangle": lambda y, t: y.tril(),
    "the last": lambda y, t: last_set(y),
    "a filled row": lambda y, t: y.index_fill(0, torch.tensor([0]), 0.0),
    "an added row": lambda y, t: y.index_add(0, torch.tensor([1]), torch.ones(1, 5, dtype=y.dtype)),
    "a scattered row": lambda y, t: y.select_scatter(torch.zeros(5, dtype=y.dtype), 0, 0),
    "the others": lambda y, t: F.pad(y[1:], (0, 0, 1, 0)),
    "a table": lambda y, t: y * torch.linspace(0, 9, 50)[positions(y)][:, None],
    "filled with the number": lambda y, t: y * torch.full((len(y), 1), len(y)),
    "made with the number": lambda y, t: y * y.new_full((len(y), 1), len(y)),
    "whether there are many": lambda y, t: y * (len(y) > 4),
}


@pytest.mark.parametrize("name", BY_POSITION)
def test_what_depends_on_positions_is_found_where_it_does_not_matter(name: str) -> None:
    with pytest.raises((MixesSamples, Refused)):
        shares_of(lambda y, t: (BY_POSITION[name](y, t) * (t > 9)).sum() + y.mean(), TARGET)


# Each computes with other samples where the random numbers of the check of the whole loss do not show it.
HIDDEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sums of samples before": lambda y, t: (y.cumsum(0) - 30).relu().mean() + y.square().mean(),
    "reversed": lambda y, t: ((y - y.flip(0)).abs() - 8).relu().mean(),
    "sorted": lambda y, t: (y.sort(0)[0] - 9).relu().mean() + y.mean(),
    "rolled where": lambda y, t: torch.where(t < -9, y.roll(1, 0), y).square().mean(),
    "by numbers of samples": lambda y, t: ((y - y[(t[:, 0] > 0).long()]) * (t[:, :1] > 9)).square().mean(),
    "pairs": lambda y, t: torch.einsum("n,m->", y[:, 0] * (t[:, 0] > 9), y[:, 1]) + y.sum(),
    "small": lambda y, t: 1e-6 * y.cumsum(0).square().mean(),
    "softmax of samples": lambda y, t: (y.softmax(0) - 1).relu().sum() + y.mean(),
    "largest targets": lambda y, t: (y * t.cumsum(0)).mean(),
    "changed view": changed_view,
    "changed target": changed_target,
    "written share": written_share,
    "filled": filled,
    "compared with the length": lambda y, t: (y * (y < len(y))).sum(),
    "chosen length": lambda y, t: (y * torch.where(t > 9, len(y), 1)).mean(),
    "decided by the length": lambda y, t: F.mse_loss(y, t) * (1 if len(y) == 10 else 2),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_mixes_samples_is_found_where_it_does_not_matter(name: str) -> None:
    with pytest.raises((MixesSamples, Refused)):
        shares = shares_of(HIDDEN[name], TARGET.detach().clone())
        shares.analysis.measures([TARGET], len(OUTPUT))


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of shares of targets": lambda y, t: ((t / t.sum()) * y).sum() / (t / t.sum()).sum(),
    "of centred targets": lambda y, t: y.sum() / (t - t.sum() / t.numel()).square().sum(),
    "times the length": lambda y, t: y.sum() / (t.abs() * len(t)).sum(),
    "of a mask": lambda y, t: y.sum() / (t > t.sum() / 50).sum(),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_that_replicas_cannot_add_up_are_marked(name: str) -> None:
    assert not all(shares_of(SUMS[name], TARGET).analysis.split.are_sums)


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_samples_is_refused_with_its_line(name: str) -> None:
    loss_fn, message = REFUSED[name]
    with pytest.raises(MixesSamples, match=message) as caught:
        shares_of(loss_fn, COLUMN if loss_fn in (padded, ones_like) else TARGET)
    if " .*:" in message:
        assert "test_loss_graph.py:" in str(caught.value)


def test_the_number_of_measures_is_limited() -> None:
    def loss(y: Tensor, t: Tensor) -> Tensor:
        return sum((y.sum() / t.amax() for _ in range(MAX_MEASURES)), y.sum())  # type: ignore[return-value]

    with pytest.raises(
        MixesSamples, match="it computes more than 63 numbers of all targets, or as many as a size says"
    ):
        shares_of(loss, TARGET)


def test_a_target_that_is_not_split_is_the_same_for_all() -> None:
    scale = torch.linspace(1, 2, 5, dtype=torch.float64)
    shares = shares_of(lambda y, t: (y * t).mean(), scale, dim=None)
    vector = torch.zeros(MAX_MEASURES, dtype=torch.float64)
    fill_measures(vector, 10, [])
    found = sum(shares(output, [scale], vector) for output in OUTPUT.split(4))
    torch.testing.assert_close(found, (OUTPUT * scale).mean())

"""Losses as users write them, and whether a step must equal the whole mini-batch's loss or refuse it.

Samples have unequal numbers of targets that count, and in some losses, the last two samples have none. With
10 samples and 3, 4 or 7 micro-batches, the last micro-batch has no others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, CLASSES, TOKENS = 6, 5, 4
# What the message names when a loss is refused: three ways out.
REFUSAL = (
    r"loss_fn\(model\(x\), y\)\.backward\(\)",
    r"normalizer=",
    r"""loss=["']per-microbatch["']""",
)


@dataclass(frozen=True)
class Case:
    """A loss.

    Attributes:
        name: its name.
        make: returns the loss_fn.
        target: returns the target of this many samples; None for losses of the output alone.
        layers: returns the layers whose output the loss is computed of.
        shape: the shape of a sample of the input.
        expected: whether a step equals the plain loop or is refused.
        dtype: that of parameters, inputs, and targets.
    """

    name: str
    make: Callable[[], Callable[..., Tensor]]
    target: Callable[[int], Any] | None
    layers: Callable[[], nn.Sequential]
    shape: tuple[int, ...] = (FEATURES,)
    expected: Literal["equal", "refused"] = "equal"
    dtype: torch.dtype = torch.float64


# Layers.


def mlp(*last: Callable[[], nn.Module], width: int = CLASSES) -> Callable[[], nn.Sequential]:
    """Returns a function that makes layers from [*, 6] to [*, width]."""

    def layers() -> nn.Sequential:
        hidden = nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU()
        return nn.Sequential(*hidden, nn.Linear(8, width), *(make() for make in last))

    return layers


def convolutions(kind: Any, *last: Callable[[], nn.Module]) -> Callable[[], nn.Sequential]:
    """Returns a function that makes layers from [N, 6, ...] to [N, 5, ...]."""

    def layers() -> nn.Sequential:
        hidden = kind(FEATURES, 8, 1), nn.Tanh(), kind(8, 8, 1), nn.ReLU()
        return nn.Sequential(*hidden, kind(8, CLASSES, 1), *(make() for make in last))

    return layers


class Heads(nn.Module):
    """Two outputs: one of 5 and one of ``width`` features."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


class NamedHeads(Heads):
    """The outputs in a dict."""

    def forward(self, x: Tensor) -> Any:
        return dict(zip(("classes", "box"), super().forward(x), strict=True))


ONE = mlp(partial(nn.Flatten, 0), width=1)  # one number for each sample
PAIRS, TRIPLETS = (mlp(partial(nn.Unflatten, 1, (n, 3)), width=3 * n) for n in (2, 3))
SEQUENCE, IMAGE = convolutions(nn.Conv1d), convolutions(nn.Conv2d)
LOG_PROBABILITIES = mlp(partial(nn.LogSoftmax, 1))
IMAGE_LOG_PROBABILITIES = convolutions(nn.Conv2d, partial(nn.LogSoftmax, 1))
HEADS, TWO_OF_FIVE = mlp(Heads), mlp(partial(Heads, CLASSES))
OF_TOKENS, OF_SEQUENCE, OF_IMAGE = (TOKENS, FEATURES), (FEATURES, TOKENS), (FEATURES, 3, 2)


# Targets.


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 1) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape, generator=_generator(seed), dtype=torch.float64)


def uniform(*shape: int, seed: int = 2) -> Callable[[int], Tensor]:
    return lambda n: torch.rand(n, *shape, generator=_generator(seed), dtype=torch.float64)


def classes(*shape: int, num: int = CLASSES, seed: int = 3) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(num, (n, *shape), generator=_generator(seed))


def binary(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: classes(*shape, num=2)(n).double()


def signs(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: binary(*shape)(n) * 2 - 1


def probabilities(*shape: int, dim: int = 1) -> Callable[[int], Tensor]:
    return lambda n: normal(*shape)(n).softmax(dim)


def mask(*shape: int, is_last_empty: bool = False) -> Callable[[int], Tensor]:
    """Marks targets that count: a sample, or the first of its elements, as many as its length says."""

    def made(n: int) -> Tensor:
        lengths = torch.tensor([4, 0, 0, 2, 0, 3, 4, 1, 2, 3])
        if is_last_empty:
            lengths = torch.tensor([4, 0, 0, 2, 1, 3, 4, 1, 0, 0])
        position = torch.arange(math.prod(shape)).view(shape)
        return position < lengths[torch.arange(n) % 10].view(-1, *[1] * len(shape))

    return made


def counted(*shape: int, ignored: int = -100, is_last_empty: bool = False) -> Callable[[int], Tensor]:
    """Classes, of which some are ignored."""
    return lambda n: classes(*shape)(n).where(mask(*shape, is_last_empty=is_last_empty)(n), ignored)


def together(*parts: Callable[[int], Any]) -> Callable[[int], Any]:
    return lambda n: tuple(part(n) for part in parts)


def by_name(**parts: Callable[[int], Any]) -> Callable[[int], Any]:
    return lambda n: {name: part(n) for name, part in parts.items()}


def ctc_target(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Padded targets, lengths of the inputs, and lengths of the targets."""
    labels = torch.randint(1, CLASSES, (n, 3), generator=_generator(5))
    return labels, torch.full((n,), 7) - torch.arange(n) % 2, torch.arange(n) % 3 + 1


def multilabels(n: int) -> Tensor:
    """Classes of each sample, ended by -1."""
    permuted = uniform(CLASSES)(n).argsort(1)
    return permuted.where(torch.arange(CLASSES) < torch.arange(n)[:, None] % 4 + 1, -1)


WEIGHTS = torch.tensor([0.7, 1.4, 0.5, 2.0, 1.1], dtype=torch.float64)


# Losses of users.


def of_language_model(y: Tensor, t: Tensor) -> Tensor:
    logits, labels = y[:, :-1].contiguous(), t[:, 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def mean_over_tokens(y: Tensor, t: Tensor) -> Tensor:
    losses = F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="none", ignore_index=-100)
    return losses.sum() / (t != -100).sum()


def losses_of_tokens(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y.transpose(1, 2), t, reduction="none")


class Trainer:
    """Computes the loss in a method, with attributes."""

    def __init__(self, smoothing: float) -> None:
        self.smoothing, self.criterion = smoothing, nn.CrossEntropyLoss(weight=WEIGHTS)

    def compute_loss(self, y: Tensor, t: Tensor) -> Tensor:
        smooth = -y.log_softmax(-1).mean()
        return (1 - self.smoothing) * self.criterion(y, t) + self.smoothing * smooth

    def __call__(self, y: Tensor, t: Tensor) -> Tensor:
        return self.criterion(y, t)


class Charbonnier(nn.Module):
    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return ((y - t) ** 2 + 1e-6).sqrt().mean()


class Uncertainties(nn.Module):
    """Two tasks, weighted by learned variances (Kendall et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variances = nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))

    def forward(self, y: Any, t: Any) -> Tensor:
        losses = torch.stack([F.cross_entropy(y[0], t[0]), F.mse_loss(y[1], t[1]) / 2])
        variance = self.log_variances
        return ((-variance).exp() * losses).sum() + variance[0] + variance[1] / 2


class Centers(nn.Module):
    """The distance from learned centres of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(normal(CLASSES, seed=7)(CLASSES))

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(y, t) + 0.1 * (y - self.centers[t]).square().sum(1).mean() / 2


class Projected(nn.Module):
    """A learned head in the loss, with a penalty of its weight."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.head, self.reduction = nn.Linear(CLASSES, 3).double(), reduction

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        loss = F.mse_loss(self.head(y), t, reduction=self.reduction)
        return loss + 0.01 * self.head.weight.square().sum()


def focal(y: Tensor, t: Tensor, gamma: float = 2.0) -> Tensor:
    losses = F.cross_entropy(y, t, reduction="none")
    return ((1 - torch.exp(-losses)) ** gamma * losses).mean()


def focal_of_boxes(y: Tensor, t: Tensor, alpha: float = 0.25) -> Tensor:
    """As in RetinaNet, divided by the number of positives."""
    p, losses = y.sigmoid(), F.binary_cross_entropy_with_logits(y, t, reduction="none")
    right = p * t + (1 - p) * (1 - t)
    return ((alpha * t + (1 - alpha) * (1 - t)) * (1 - right) ** 2 * losses).sum() / t.sum().clamp(min=1)


def dice(dim: tuple[int, ...] | None) -> Callable[..., Tensor]:
    def loss(y: Tensor, t: Tensor) -> Tensor:
        p = y.sigmoid()
        both, either = (p * t).sum(dim), p.sum(dim) + t.sum(dim)
        return (1 - (2 * both + 1) / (either + 1)).mean()

    return loss


def distilled(y: Tensor, t: Tensor, temperature: float = 2.0) -> Tensor:
    student, teacher = F.log_softmax(y / temperature, -1), F.softmax(t / temperature, -1)
    return F.kl_div(student, teacher, reduction="batchmean") * temperature**2


def of_student(y: Tensor, t: Any) -> Tensor:
    return 0.3 * F.cross_entropy(y, t["labels"]) + 0.7 * distilled(y, t["teacher"])


def dpo(y: Tensor, t: Tensor, beta: float = 0.5) -> Tensor:
    """The pair of a sample: its chosen and its rejected answer."""
    chosen, rejected = (y - t).unbind(1)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


def ppo(y: Tensor, t: Any) -> Tensor:
    distribution = torch.distributions.Categorical(logits=y, validate_args=False)
    ratio = (distribution.log_prob(t["action"]) - t["before"]).exp()
    clipped = ratio.clamp(0.8, 1.2) * t["advantage"]
    return -torch.min(ratio * t["advantage"], clipped).mean() - 0.01 * distribution.entropy().mean()


def gaussian(y: Any, t: Tensor) -> Tensor:
    mean, log_scale = y
    return (0.5 * math.log(2 * math.pi) + log_scale + 0.5 * ((t - mean) / log_scale.exp()) ** 2).mean()


def smoothed_by_hand(y: Tensor, t: Tensor, smoothing: float = 0.1) -> Tensor:
    log_probabilities = y.log_softmax(-1)
    of_target = -log_probabilities.gather(1, t.unsqueeze(1)).squeeze(1)
    return ((1 - smoothing) * of_target + smoothing * -log_probabilities.mean(-1)).mean()


def z_loss(y: Tensor, *_: Any) -> Tensor:
    return 1e-2 * y.logsumexp(-1).pow(2).mean()


def variational(y: Any, t: Tensor) -> Tensor:
    mean, log_variance = y
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return ((mean - t).square().sum() + divergence) / t.size(0)


def mean_of_answers(y: Tensor, t: Any) -> Tensor:
    """The mean over samples of means over their tokens, as in GRPO."""
    losses, keeps = losses_of_tokens(y, t[0]), t[1]
    return ((losses * keeps).sum(1) / keeps.sum(1).clamp(min=1)).mean()


def of_next_tokens(y: Tensor, t: Tensor) -> Tensor:
    """Several predictions of each position, each a mean over targets of its own."""
    return sum(0.5**i * F.cross_entropy(y[:, i], t[:, i]) for i in range(TOKENS))  # type: ignore[return-value]


def closure(scale: float) -> Callable[..., Tensor]:
    priors = WEIGHTS.log()

    def adjusted(y: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(y + scale * priors, t)

    return adjusted


def linear_loss() -> Any:
    return nn.LinearCrossEntropyLoss(CLASSES, 3, dtype=torch.float64)


# Losses that compare samples.


def contrastive(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.normalize(y, dim=1) @ F.normalize(t, dim=1).T / 0.2, torch.arange(len(y)))


def clip(y: Any) -> Tensor:
    similarity, labels = y[0] @ y[1].T, torch.arange(len(y[0]))
    return (F.cross_entropy(similarity, labels) + F.cross_entropy(similarity.T, labels)) / 2


def correlation(y: Tensor, t: Tensor) -> Tensor:
    y, t = y - y.mean(), t - t.mean()
    return 1 - (y * t).sum() / (y.norm() * t.norm())


def halves(y: Tensor) -> Tensor:
    """DPO's pairs, chosen ones in the first half of the mini-batch."""
    chosen, rejected = y[: len(y) // 2], y[len(y) // 2 : len(y) // 2 * 2]
    return -F.logsigmoid(chosen - rejected).mean()


# The table.

_CASES: list[Case] = []


def add(
    name: str,
    make: Callable[[], Callable[..., Tensor]],
    target: Callable[[int], Any] | None,
    layers: Callable[[], nn.Sequential] | None = None,
    shape: tuple[int, ...] = (FEATURES,),
    **rest: Any,
) -> None:
    _CASES.append(Case(name, make, target, layers or mlp(), shape, **rest))


def add_of_classes() -> None:
    lone = partial(counted, is_last_empty=True)
    add("cross_entropy", lambda: F.cross_entropy, classes())
    add("cross_entropy, sum", lambda: partial(F.cross_entropy, reduction="sum"), classes())
    add("CrossEntropyLoss, weight", lambda: nn.CrossEntropyLoss(WEIGHTS), classes())
    add("cross_entropy, a micro-batch ignored", lambda: F.cross_entropy, lone())
    add("cross_entropy, ignore_index", lambda: partial(F.cross_entropy, ignore_index=2), counted(ignored=2))
    add("label_smoothing, weight, ignored", lambda: nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1), lone())
    add("probabilities, weight", lambda: nn.CrossEntropyLoss(WEIGHTS), probabilities(CLASSES))
    add(
        "probabilities, label_smoothing",
        lambda: lambda y, t: F.cross_entropy(y, t, label_smoothing=0.2),
        probabilities(CLASSES),
    )
    add("cross_entropy, none", lambda: lambda y, t: F.cross_entropy(y, t, reduction="none").mean(), classes())
    add("cross_entropy, sequences, ignored", nn.CrossEntropyLoss, lone(TOKENS), SEQUENCE, OF_SEQUENCE)
    add("cross_entropy, images", lambda: nn.CrossEntropyLoss(WEIGHTS), counted(3, 2), IMAGE, OF_IMAGE)
    add("probabilities, images", lambda: F.cross_entropy, probabilities(CLASSES, 3, 2), IMAGE, OF_IMAGE)
    add(
        "NLLLoss, weight, ignore_index",
        lambda: nn.NLLLoss(WEIGHTS, ignore_index=-1),
        counted(ignored=-1),
        LOG_PROBABILITIES,
    )
    add("NLLLoss, images, ignored", nn.NLLLoss, lone(3, 2), IMAGE_LOG_PROBABILITIES, OF_IMAGE)
    add(
        "nll_loss, sum, lambda",
        lambda: lambda y, t: F.nll_loss(F.log_softmax(y, dim=1), t, reduction="sum"),
        counted(),
    )
    if hasattr(F, "linear_cross_entropy"):
        add("LinearCrossEntropyLoss", linear_loss, classes(num=3))


def add_of_language_models() -> None:
    lone = partial(counted, TOKENS, is_last_empty=True)
    losses: dict[str, Callable[..., Tensor]] = {
        "flatten": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
        "view": lambda y, t: F.cross_entropy(y.view(-1, CLASSES), t.view(-1), ignore_index=-100),
        "shifted": of_language_model,
        "shifted by a pad": lambda y, t: F.cross_entropy(
            y.flatten(0, 1), F.pad(t, (0, 1), value=-100)[:, 1:].flatten()
        ),
        "transposed": lambda y, t: F.cross_entropy(y.transpose(1, 2), t),
        "permuted": lambda y, t: F.cross_entropy(y.permute(0, 2, 1), t),
        "by hand": mean_over_tokens,
        "sum": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum"),
    }
    for name, loss in losses.items():
        add(f"language model, {name}", lambda loss=loss: loss, lone(), shape=OF_TOKENS)
    add(
        "language model, gather",
        lambda: lambda y, t: -y.log_softmax(-1).gather(-1, t.unsqueeze(-1)).mean(),
        classes(TOKENS),
        shape=OF_TOKENS,
    )
    add(
        "language model, float",
        lambda: lambda y, t: F.cross_entropy(y.float().flatten(0, 1), t.flatten()),
        lone(),
        shape=OF_TOKENS,
        dtype=torch.float32,
    )


def add_of_elements() -> None:
    five, rates = normal(CLASSES), lambda n: (uniform(CLASSES)(n) * 6).floor()
    log_probabilities = lambda n: normal(CLASSES)(n).log_softmax(1)  # noqa: E731
    of_pytorch: list[tuple[Any, Callable[[int], Tensor], Any, dict[str, Any]]] = [
        (nn.MSELoss, five, None, {}),
        (nn.L1Loss, five, None, {}),
        (nn.SmoothL1Loss, five, None, {"beta": 0.3}),
        (nn.HuberLoss, five, None, {"delta": 0.3}),
        (nn.BCELoss, binary(CLASSES), mlp(nn.Sigmoid), {"weight": WEIGHTS}),
        (nn.BCEWithLogitsLoss, uniform(CLASSES), None, {"pos_weight": WEIGHTS}),
        (nn.PoissonNLLLoss, rates, mlp(nn.Softplus), {"log_input": False, "full": True}),
        (nn.SoftMarginLoss, signs(CLASSES), None, {}),
        (nn.HingeEmbeddingLoss, signs(CLASSES), None, {"margin": 0.4}),
        (nn.KLDivLoss, log_probabilities, LOG_PROBABILITIES, {"log_target": True}),
        (nn.MultiMarginLoss, classes(), None, {"p": 2, "margin": 0.7, "weight": WEIGHTS}),
        (nn.MultiLabelMarginLoss, multilabels, None, {}),
        (nn.MultiLabelSoftMarginLoss, binary(CLASSES), None, {"weight": WEIGHTS}),
    ]
    for (make, target, layers, options), reduction in itertools.product(of_pytorch, ("mean", "sum")):
        loss = partial(make, **options, reduction=reduction)
        add(f"{make.__name__}, {reduction}", loss, target, layers)
    add("mse_loss, float32", lambda: F.mse_loss, five, dtype=torch.float32)
    add(
        "mse_loss, weight",
        lambda: lambda y, t: F.mse_loss(y, t[0], weight=t[1]),
        together(five, uniform(CLASSES)),
    )
    add(
        "GaussianNLLLoss, full, sum",
        lambda: lambda y, t: nn.GaussianNLLLoss(full=True, reduction="sum")(y, t[0], t[1]),
        together(five, uniform(CLASSES)),
    )


def add_of_several_outputs() -> None:
    cosine = F.cosine_embedding_loss
    add("cosine_embedding_loss", lambda: lambda y, t: cosine(y[:, 0], y[:, 1], t), signs(), PAIRS)
    add(
        "CosineEmbeddingLoss, margin, sum",
        lambda: lambda y, t: nn.CosineEmbeddingLoss(margin=0.2, reduction="sum")(y[0], y[1], t),
        signs(),
        TWO_OF_FIVE,
    )
    add(
        "TripletMarginLoss, swap, sum",
        lambda: lambda y: nn.TripletMarginLoss(swap=True, reduction="sum")(y[:, 0], y[:, 1], y[:, 2]),
        None,
        TRIPLETS,
    )
    add(
        "triplet_margin_with_distance_loss",
        lambda: (
            lambda y, t: F.triplet_margin_with_distance_loss(y, *t, distance_function=nn.PairwiseDistance(1))
        ),
        together(normal(5, seed=8), normal(5, seed=9)),
    )
    ctc = partial(F.ctc_loss, zero_infinity=True)
    of_ctc = ctc_target, mlp(partial(nn.LogSoftmax, 2)), (7, FEATURES)
    add("ctc_loss, none", lambda: lambda y, t: ctc(y.transpose(0, 1), *t, reduction="none").mean(), *of_ctc)


def add_of_other_callables() -> None:
    add("partial of a lambda", lambda: partial(lambda k, y, t: k * F.mse_loss(y, t), 3.0), normal(CLASSES))
    add("a method", lambda: Trainer(0.1).compute_loss, classes())
    add("an object", lambda: Trainer(0), counted())
    add("a module", Charbonnier, normal(CLASSES))
    add("a closure over tensors", lambda: closure(0.7), counted())
    add("a compiled function", lambda: torch.compile(F.mse_loss, backend="eager"), normal(CLASSES))
    tasks = together(classes(), normal(2))
    add("a method of a module with parameters", lambda: Uncertainties().forward, tasks, HEADS)
    add(
        "a module with parameters, ignored",
        Uncertainties,
        together(counted(is_last_empty=True), normal(2)),
        HEADS,
    )
    add("a module with centres", Centers, classes())
    add("a module with a head, sum", lambda: Projected("sum"), normal(3))


def add_masked() -> None:
    """Masked means in several spellings, with a micro-batch that has no target that counts."""
    spellings: dict[str, Callable[..., Tensor]] = {
        "indexed": lambda losses, keeps: losses[keeps].mean(),
        "quotient": lambda losses, keeps: (losses * keeps).sum() / keeps.sum(),
        "clamped": lambda losses, keeps: (losses * keeps).sum() / keeps.sum().clamp(min=1),
        "where": lambda losses, keeps: torch.where(keeps, losses, 0).sum() / keeps.sum(),
        "masked_select": lambda losses, keeps: torch.masked_select(losses, keeps).mean(),
    }
    for name, mean in spellings.items():
        add(
            f"masked mean, {name}",
            lambda mean=mean: lambda y, t: mean(losses_of_tokens(y, t["y"]), t["mask"]),
            by_name(y=classes(TOKENS), mask=mask(TOKENS, is_last_empty=True)),
            shape=OF_TOKENS,
        )
    regression = together(normal(CLASSES), mask(CLASSES))
    add("masked mean, output indexed", lambda: lambda y, t: F.mse_loss(y[t[1]], t[0][t[1]]), regression)
    add(
        "masked mean, NaN in the target",
        lambda: lambda y, t: F.mse_loss(y[~t.isnan()], t[~t.isnan()]),
        lambda n: normal(CLASSES)(n).where(mask(CLASSES)(n), math.nan),
    )
    add(
        "masked mean, float mask",
        lambda: lambda y, t: ((y - t[0]).abs() * t[1]).sum() / (t[1].sum() + 1e-08),
        together(normal(CLASSES), lambda n: mask(CLASSES)(n).double()),
    )
    add(
        "mean of masked means of samples",
        lambda: mean_of_answers,
        together(classes(TOKENS), mask(TOKENS, is_last_empty=True)),
        shape=OF_TOKENS,
    )


def add_of_users() -> None:
    five = normal(CLASSES)
    weighted = by_name(y=classes(), w=uniform())
    each = partial(F.cross_entropy, reduction="none")
    add(
        "weights of samples, average",
        lambda: lambda y, t: (t["w"] * each(y, t["y"])).sum() / t["w"].sum(),
        weighted,
    )
    add(
        "weights of samples, normalised",
        lambda: lambda y, t: (t["w"] / t["w"].sum() * each(y, t["y"])).sum(),
        weighted,
    )
    add("focal", lambda: focal, classes())
    add("focal of boxes", lambda: focal_of_boxes, lambda n: mask(CLASSES, is_last_empty=True)(n).double())
    add("dice of samples", lambda: dice((1, 2, 3)), binary(CLASSES, 3, 2), IMAGE, OF_IMAGE)
    add("distilled and labelled, dict", lambda: of_student, by_name(labels=classes(), teacher=five))
    add(
        "tasks with factors, tuples",
        lambda: lambda y, t: F.cross_entropy(y[0], t[0]) + 0.5 * F.smooth_l1_loss(y[1], t[1]),
        together(classes(), normal(2)),
        HEADS,
    )
    add(
        "tasks with divisors of their own",
        lambda: lambda y, t: 2 * F.cross_entropy(y[0], t[0]) + F.mse_loss(y[1], t[1], reduction="sum"),
        together(counted(is_last_empty=True), normal(2)),
        HEADS,
    )
    add(
        "tasks, dicts",
        lambda: lambda y, t: F.cross_entropy(y["classes"], t["classes"]) + F.l1_loss(y["box"], t["box"]),
        by_name(classes=classes(), box=normal(2)),
        mlp(NamedHeads),
    )
    add(
        "tasks, stacked, several elements",
        lambda: lambda y, t: torch.stack([(y - t).square().sum(1), (y - t).abs().amax(1)], 1).mean(),
        five,
    )
    add("DPO of a sample's pair", lambda: dpo, normal(2), mlp(width=2))
    rollout = by_name(action=classes(), before=lambda n: uniform()(n).log(), advantage=normal())
    add("PPO with entropy", lambda: ppo, rollout)
    add("Gaussian by hand", lambda: gaussian, five, TWO_OF_FIVE)
    add("mean with penalty", lambda: lambda y, t: F.mse_loss(y, t) + 0.01 * y.pow(2).mean(), five)
    add("smoothed by hand", lambda: smoothed_by_hand, classes())
    add("z-loss", lambda: lambda y, t: F.cross_entropy(y, t) + z_loss(y), classes())
    add(
        "z-loss, ignored",
        lambda: lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()) + z_loss(y),
        counted(TOKENS, is_last_empty=True),
        shape=OF_TOKENS,
    )
    add(
        "means of dimensions, sum",
        lambda: lambda y, t: F.mse_loss(y, t, reduction="none").mean(1).sum(),
        five,
    )
    add("output alone", lambda: lambda y: y.square().mean(), None)
    squares = lambda y, t: (y - t).square().sum()  # noqa: E731
    add("sum over len", lambda: lambda y, t: squares(y, t) / len(y), five)
    add("sum over size(0)", lambda: lambda y, t: squares(y, t) / (2 * t.size(0)), five)
    add("sum over a sum of targets", lambda: lambda y, t: (y - t).abs().sum() / t.sum(), uniform(CLASSES))
    add("inner product", lambda: lambda y, t: -torch.einsum("nc,nc->", y, t) / len(y), five)
    add("variational", lambda: variational, five, TWO_OF_FIVE)
    add(
        "perplexity of samples",
        lambda: lambda y, t: losses_of_tokens(y, t).mean(1).exp().mean(),
        classes(4),
        None,
        OF_TOKENS,
    )
    add("positions in a loop, ignored", lambda: of_next_tokens, counted(TOKENS), shape=OF_TOKENS)
    add("variance of a sample", lambda: lambda y: F.relu(1 - y.var(1)).mean(), None)


def add_refused() -> None:
    refuse = partial(add, expected="refused")
    five = normal(CLASSES)
    refuse("InfoNCE over the batch", lambda: contrastive, five)
    refuse("CLIP", lambda: clip, None, TWO_OF_FIVE)
    refuse("log of a mean", lambda: lambda y: torch.log(torch.mean(torch.exp(y))), None)
    refuse("perplexity", lambda: lambda y, t: torch.exp(F.cross_entropy(y, t)), classes())
    refuse("RMSE", lambda: lambda y, t: torch.sqrt(F.mse_loss(y, t)), five)
    refuse("dice of the batch", lambda: dice(None), binary(CLASSES, 3, 2), IMAGE, OF_IMAGE)
    refuse(
        "weights of the output",
        lambda: lambda y, t: (y.sigmoid() * (y - t).square()).sum() / y.sigmoid().sum(),
        five,
    )
    refuse("variance over the batch", lambda: lambda y: F.relu(1 - y.var(0)).mean(), None)
    refuse("softmax over the batch", lambda: lambda y, t: -(y.log_softmax(0) * t).mean(), uniform(CLASSES))
    refuse("sort over the batch", lambda: lambda y, t: F.l1_loss(y.sort(0).values, t.sort(0).values), five)
    refuse("correlation", lambda: correlation, normal(), ONE)
    refuse("maximum over the batch", lambda: lambda y: y.max(), None)
    refuse("product of means", lambda: lambda y, t: F.mse_loss(y, t) * y.abs().mean(), five)
    refuse("pairs in two halves", lambda: halves, None, ONE)
    refuse("targets of other samples", lambda: lambda y, t: F.mse_loss(y, t.roll(1, 0)), five)
    refuse("the first sample", lambda: lambda y: y[0].square().sum(), None)
    refuse(
        "weights of positions",
        lambda: (
            lambda y, t: (F.mse_loss(y, t, reduction="none").mean(1) * torch.linspace(0, 1, len(y))).mean()
        ),
        five,
    )


for fill in (
    add_of_classes,
    add_of_language_models,
    add_of_elements,
    add_of_several_outputs,
    add_of_other_callables,
    add_masked,
    add_of_users,
    add_refused,
):
    fill()
CASES = {case.name: case for case in _CASES}
assert len(CASES) == len(_CASES), "two losses have one name"

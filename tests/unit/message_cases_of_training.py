"""Calls of `GPipe.step`, `GPipe.stream` and `GPipe.load_weights` that raise errors."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.schedule import Schedule, fill_drain, interleaved
from tests.unit.message_cases import case
from tests.untraceable import FunctionLayer

X, Y = torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)
OF_ANOTHER_MODEL = torch.optim.SGD(nn.Linear(3, 3).parameters())


def two_stages(*layers: nn.Module, **options: Any) -> GPipe:
    layers = layers or (nn.Linear(3, 3), nn.Linear(3, 3))
    return GPipe(nn.Sequential(*layers), [1, 1], devices=["cpu"] * 2, **options)


def step(loss_fn: Any = F.cross_entropy, target: Any = Y, schedule: Any = "gpipe", **more: Any) -> object:
    return two_stages(chunks=2, schedule=schedule).step(X, target=target, loss_fn=loss_fn, **more)


def step_with(make: Any = torch.optim.SGD, **options: Any) -> None:
    layer = nn.Linear(3, 3)
    pipe = GPipe(nn.Sequential(layer), [1], devices=["cpu"])
    pipe.step(X, target=Y, loss_fn=F.cross_entropy, optimizer=make(layer.parameters()), **options)


def frozen() -> object:
    pipe = two_stages().requires_grad_(False)
    return pipe.step(X, target=Y, loss_fn=F.cross_entropy)


def every_sample(output: Tensor, target: Tensor) -> Tensor:
    return (output - 1).square().sum(1)


class Sums(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y.sum()


def sums(loss_fn: Any) -> object:
    pipe = two_stages(nn.Linear(3, 3), Sums(3, 3), chunks=2)
    return pipe.step(X, target=Y, loss_fn=loss_fn)


def joined() -> object:
    pipe = two_stages(nn.Linear(3, 3), nn.Flatten(0), chunks=2)
    return pipe.step(X, target=Y, loss_fn=lambda a, b: a.sum())


def wide() -> object:
    pipe = GPipe(nn.Sequential(nn.Linear(3, 1), nn.Upsample(2**22)), [1, 1], devices=["cpu"] * 2, chunks=2)
    return pipe.step(X[:, None], loss_fn=lambda y: (y.view(-1, 2**22) - 1).sum())


def longer_batch() -> None:
    pipe = two_stages(chunks=2)
    for size in (4, 6):
        x = torch.ones(size, 3)
        pipe.step(x, target=x, loss_fn=lambda a, b: F.mse_loss(a, b) * (1 if len(a) == 6 else 2))


def first(x: Tensor) -> Tensor:
    """Returns ones for the first samples, of which a check of few samples sees no others."""
    return torch.ones(len(x), 1).triu(-4)[:, 0]


def twice(a: Tensor) -> Tensor:
    return a.repeat_interleave(2, 0)


def numbers(x: Tensor) -> Tensor:
    return torch.arange(len(x))


def lengths(x: Tensor) -> Tensor:
    return torch.full((len(x),), len(x))


def cholesky(x: Tensor) -> Tensor:
    return torch.linalg.cholesky(x[:, :, None] * x[:, None] + torch.eye(3))


COMPLEX = torch.zeros(4, dtype=torch.complex64)
WEIGHT = nn.Parameter(torch.ones(3))
NO_LAYERS = GPipe(nn.Sequential(), [])
DESCENDING = Schedule.from_csv("0F1,0F0,0B1,0B0\n1F1,1F0,1B1,1B0")

STEPS = [
    case("got '2f2b'", "'gpipe', '1f1b'", step, schedule="2f2b"),
    case("got 3", "a function of the numbers of stages and micro-batches", step, schedule=3),
    case("got int", "by Schedule.of", step, schedule=lambda num_stages, num_microbatches: 3),
    case("has 1 stages and 2", "a function of both numbers", step, schedule=fill_drain(1, 2)),
    case("micro-batches [1, 0] and backwards", "in ascending order", step, schedule=DESCENDING),
    case("got 3 stages for 2 ranks", "a multiple of 2", interleaved, 3, 2, num_ranks=2),
    case("stage 0 runs on two ranks", "rank 1  >0F1<", Schedule.parse, "0F0\n0F1"),
    case("which are disabled here", "outside of torch.no_grad()", torch.no_grad()(step)),
    case("got int", "cross_entropy", step, 3),
    case("got 'mean'", "'exact', 'per-microbatch'", step, loss="mean"),
    case("by <lambda>", "normalizer=", step, lambda a, b: a.mean().sqrt()),
    case("max at ", "loss_fn(model(x), y).backward()", step, lambda a, b: a.max()),
    case("with one element, got torch.Size(", "a mean", step, nn.CrossEntropyLoss(reduction="none")),
    case("1] differ", "reshape one", step, F.mse_loss, torch.ones(4, 1)),
    case("computes with the size Mod(", "", step, lambda a, b: a.sum() / (len(a) % 3 + 1)),
    case("as torch.linspace does", "", step, lambda a, b: a.sum() * torch.linspace(0, 1, len(a)).sum()),
    case("decides by the number of samples", "", step, lambda a, b: a.sum() if len(a) > 50 else a.mean()),
    case("has no batch dimension", "for each sample", sums, lambda a, b: a[1].sum()),
    case("different batch sizes, [2, 6]", "", joined),
    case("computes nothing from the output", "", step, lambda a, b: None),
    case("is no parameter of it", "pass an nn.Module", step, lambda a, b: (a * WEIGHT).sum()),
    case("does not add up to what", "normalizer=", step, lambda a, b: (a.sum(1) * first(a)).sum()),
    case("gives no finite number", "normalizer=", step, lambda a, b: (a / 0).sum()),
    case("decides by the number of samples", "normalizer=", longer_batch),
    case("operands are too large", "normalizer=", wide),
    case("checked on random numbers: ", "normalizer=", step, lambda a, b: cholesky(a).sum()),
    case("multiplies samples", "normalizer=", step, lambda a, b: torch.einsum("nc,mc->", a, a)),
    case("it mixes samples", "normalizer=", step, lambda a, b: (a - a.flip(0)).abs().sum()),
    case("computes with the positions of samples", "", step, lambda a, b: (a[:, 0] * numbers(a)).sum()),
    case("depends on its position, or on", "", step, lambda a, b: twice(a)[numbers(a)].sum()),
    case("computes with the number of samples", "", step, lambda a, b: (a[:, 0] * lengths(a)).sum()),
    case("checked on few samples: ", "", step, lambda a, b: a.sum() + torch.zeros(len(a) - 4).sum()),
    case("elements depends on data", "normalizer=", step, lambda a, b: a.sum() * b.nonzero().sum()),
    case("each selected element by itself", "", step, lambda a, b: a[b > 0].cumsum(0).sum()),
    case("changes a tensor in place", "change a clone", step, lambda a, b: a.sum() + b.add_(1).sum()),
    case("with a size of outputs", "a mask", step, lambda a, b: a.sum() * (b[:, None] * numbers(a.T)).sum()),
    case("a complex number of all targets", "", step, lambda a, b: a.sum() * b.sum().abs(), COMPLEX),
    case("with one element, got torch.Size([2])", "a sum", step, every_sample, normalizer=1),
    case("of shape [3], but the batch size is 4", "replicate", step, target=Y[:3]),
    case("the target is on meta", ".to('cpu')", step, target=Y.to("meta")),
    case("no parameter and no input that requires one", "model.evaluate", frozen),
    case("step got no target", "pass target=", step, target=None),
    case("the model has no layers", "pass some", NO_LAYERS.step, X, target=Y, loss_fn=F.mse_loss),
    case("got type", "torch.optim.AdamW(model.parameters())", step, optimizer=torch.optim.SGD),
    case("none of the optimizer's 2 parameters", "of model.parameters()", step, optimizer=OF_ANOTHER_MODEL),
    case("got float", "torch.amp.GradScaler('cuda'), or 'cpu'", step, scaler=2.0**16),
    case("got str", "the maximum norm", step_with, max_norm="inf"),
    case("at least 0, got -1.0", "pass None", step_with, max_norm=-1.0),
    case("that requires a gradient", ".detach()", step, target=torch.randn(4, requires_grad=True)),
    case("got a tensor of shape [2]", "return a sum", step, normalizer=torch.ones(2)),
    case("divided by normalizer=0", "such as len(target)", step, every_sample, normalizer=0),
    case("got str", "a function of the target that returns one", step, every_sample, normalizer="4"),
    case("LBFGS calls a closure several times", "optimizer.step(closure)", step_with, torch.optim.LBFGS),
    case("got tuple", "losses=[]", step, losses=()),
    case("got max_norm=1.0 without one", "pass optimizer=", step, max_norm=1.0),
]

# Streams


def noise(sign: int, seconds: float) -> nn.Module:
    """Returns a layer that draws for inputs with this sign, after some seconds."""

    def draw(held: nn.Module, x: Tensor) -> Tensor:
        if float(x[0, 0]) != sign:
            return x
        time.sleep(seconds)
        return F.dropout(x, 0.5)

    return FunctionLayer(draw)


def stream(batches: Any, *layers: nn.Module, depth: Any = 2) -> object:
    return list(two_stages(*layers, backend="eager").stream(batches, depth=depth))


def move_stages() -> None:
    pipe = two_stages()
    for _ in pipe.stream([X, X, X], depth=1):
        pipe.balance = [2]


ONES = torch.ones(4, 3)

STREAMS = [
    case("got a tensor of shape [4, 3]", "pass [x]", stream, X),
    case("got 0", "a positive integer or None", stream, [X], depth=0),
    case("while a stream is open", "open another with model.stream()", move_stages),
    case("mini-batch 0 of the", "model(x) for each", stream, [-ONES, ONES], noise(1, 0), noise(-1, 0.2)),
]

# Loading weights


def load(source: object, **options: Any) -> None:
    """Loads a source into a linear layer on the meta device."""
    GPipe(nn.Sequential(nn.Linear(2, 2, device="meta")), [1]).load_weights(source, **options)


def zero_weight(layer: nn.Module) -> None:
    layer.weight.zero_()


def load_with_a_hook() -> None:
    model = GPipe(nn.Sequential(nn.Linear(2, 2, device="meta")), [1])
    model[0].weight.register_hook(print)
    model.load_weights({}, strict=False, init=print)


def load_file(name: str, content: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.save({}, Path(folder, "shard.pt"))
        path = Path(folder, name)
        if name.endswith(".pt"):
            torch.save(content, path)
        else:
            path.write_text(json.dumps(content))
        load(path)


INDEX = {"weight_map": {"0.weight": "shard.pt"}}

WEIGHTS = [
    case("is a folder", "model.safetensors", load, "."),
    case("got 3", "names of tensors", load, {3: torch.ones(2)}),
    case("'0.weight' on the meta device", "of a file", load, {"0.weight": torch.ones(2, device="meta")}),
    case("x.bin cannot be mapped", "again", load_file, "x.bin", {}),
    case("init must be a function of a module, got int", "reset_parameters", load, {}, strict=False, init=3),
    case("got int", "pass a mapping", load, 3),
    case("contains a int", "save model.state_dict()", load_file, "model.pt", 3),
    case("has no 'weight_map'", "model.safetensors.index.json", load_file, "x.index.json", {}),
    case("lack: 0.weight", "again", load_file, "model.pt.index.json", INDEX),
    case("a meta tensor", "after the model is loaded", load_with_a_hook),
    case("would have", "save it again", load_file, "x.safetensors", {}),
    case("lacks 0.weight, 0.bias", "pass init=function", load, {}, strict=False),
    case("init left 0.bias", "every element", load, {}, strict=False, init=zero_weight),
]

OF_TRAINING = [*STEPS, *STREAMS, *WEIGHTS]

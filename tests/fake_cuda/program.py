"""Steps of pipelines on devices that are not there; run by test_fake_cuda.py with runtime.cpp preloaded.

`program.py OPERATORS MODEL DEVICES CHECKPOINT...`: loads the operators, trains a model of four stages on a
device for each (``cuda:0,cpu,..``) in some checkpoint modes, and compares all with the plain loop on the same
devices. Prints what differs, or "equal".
"""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, keyed_rng
from gpipe_fast.skip import pop, skippable, stash

BATCH, CHUNKS, WIDTH, STEPS = 16, 8, 12, 4


@skippable(stash=["skip"])
class Down(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        yield stash("skip", x)
        return x.tanh()


@skippable(pop=["skip"])
class Up(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        skip = yield pop("skip")
        return x + skip.to(x.device)


class Several(nn.Module):
    """Returns what is not laid out as usual, and integers."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.t(), x[:, ::2], torch.full_like(x, 3, dtype=torch.int64)


class One(nn.Module):
    def forward(self, values: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        turned, half, threes = values
        return turned.t() * threes + torch.cat([half, half], -1)


class Branching(nn.Module):
    """Cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() if x.sum() > 0 else x.sigmoid()


def layers_of(model: str) -> list[nn.Module]:
    """Four stages of two layers, whichever devices they are on."""
    linear = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    norm = nn.LayerNorm(WIDTH)
    if model == "mlp":
        return [linear[0], nn.GELU(), linear[1], norm, linear[2], nn.ReLU(), linear[3], nn.Tanh()]
    if model == "skips":
        return [Down(), linear[0], linear[1], nn.GELU(), linear[2], norm, Up(), linear[3]]
    if model == "several":
        return [linear[0], Several(), One(), linear[1], Several(), One(), linear[2], norm]
    if model == "batch norm":
        return [
            linear[0],
            nn.BatchNorm1d(WIDTH),
            linear[1],
            nn.BatchNorm1d(WIDTH),
            *linear[2:],
            nn.Tanh(),
            norm,
        ]
    if model == "dropout":
        return [
            linear[0],
            nn.Dropout(0.3),
            linear[1],
            nn.Dropout(0.5),
            linear[2],
            norm,
            linear[3],
            nn.Dropout(0.1),
        ]
    assert model == "python", model
    return [linear[0], nn.GELU(), Branching(), norm, linear[2], nn.ReLU(), linear[3], Branching()]


def moved(value: object, device: str) -> object:
    if isinstance(value, tuple):
        return tuple(moved(each, device) for each in value)
    assert isinstance(value, Tensor)
    return value.to(device)


class Moving(nn.Sequential):
    """Moves what goes from one stage to another."""

    def __init__(self, layers: Sequence[nn.Module], devices: Sequence[str]) -> None:
        super().__init__(*layers)
        self.devices = devices

    def forward(self, value: object) -> object:
        for index, layer in enumerate(self):
            value = layer(moved(value, self.devices[index // 2]))
        return value


def unequal(model: str, devices: Sequence[str], checkpoint: str) -> list[str]:
    """What differs from the plain loop."""
    mark = ctypes.CDLL(None).fake_cuda_mark
    layers = layers_of(model)
    copies = copy.deepcopy(layers)
    pipeline = GPipe(
        nn.Sequential(*copies), [2] * len(devices), devices=devices, chunks=CHUNKS, checkpoint=checkpoint
    )
    for index, layer in enumerate(layers):
        layer.to(devices[index // 2])
    plain = Moving(layers, devices)
    x = torch.randn(BATCH, WIDTH).to(devices[0])
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        # Plans are made by the first steps.
        mark(b"begin" if step > 1 else b"plan")
        y = pipeline(inputs[0])
        y.square().sum().backward()
        mark(b"end")
        torch.manual_seed(step)
        with keyed_rng(plain):
            z = torch.cat([plain(part) for part in inputs[1].chunk(CHUNKS)])
        z.square().sum().backward()
        found += [f"output of step {step}"] if not torch.equal(y.cpu(), z.cpu()) else []
    expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers()), "the input": inputs[1]}
    own = {**dict(pipeline.named_parameters()), **dict(pipeline.named_buffers()), "the input": inputs[0]}
    assert own.keys() == expected.keys()
    for name, tensor in own.items():
        for what in ("value", "gradient"):
            pair = [t if what == "value" else t.grad for t in (tensor, expected[name])]
            if None not in pair and not torch.equal(pair[0].cpu(), pair[1].cpu()):
                found.append(f"{what} of {name}")
    return found


def main() -> None:
    operators, model, devices, *checkpoints = sys.argv[1:]
    torch.ops.load_library(operators)
    torch.backends.cudnn.enabled = False
    torch.set_num_threads(1)
    found = []
    for checkpoint in checkpoints:
        torch.manual_seed(0)
        found += [f"{checkpoint}: {what}" for what in unequal(model, devices.split(","), checkpoint)]
    print("; ".join(found) or "equal")


if __name__ == "__main__":
    main()

"""Training under autocast on fake devices; run by test_casts.py with the fake runtime preloaded.

`cast_cases.py OPERATORS MODEL DEVICES CHECKPOINT CAPTURE`: loads the operators and trains a model (``linear``
or ``tied``) in two stages on DEVICES (``cuda:0,cuda:1``), with captured graphs if CAPTURE is ``captured``.
Compares the output and all gradients with the plain loop. Prints a JSON object: the differences, the replays,
the addresses of the parameters, and the bytes allocated on the first device, with and without hoisted casts.
Marks in the log enclose the forward and the backward of the last step.
"""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.fake_cuda.fake_devices import copied, load, mark, plain_loop
from tests.fake_cuda.train_models import MovingSequential, TiedLinear
from tests.internals import inject_failure, pipeline_of, remove_faults, with_hoisted_casts

WIDTH, BATCH, CHUNKS, STEPS = 48, 8, 4, 5


def layers_of(model: str) -> list[nn.Module]:
    """Returns four layers, two for each stage."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    last = TiedLinear(first[0]) if model == "tied" else nn.Linear(WIDTH, WIDTH)
    return [first, nn.Tanh(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), last]


def autocast() -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)


class Case:
    """A pipeline and the plain loop with the same layers."""

    def __init__(self, model: str, devices: list[str], checkpoint: str, capture: bool) -> None:
        layers = layers_of(model)
        options = {"devices": devices, "checkpoint": checkpoint, "capture": capture}
        self.pipe = GPipe(copied(layers), [2, 2], chunks=CHUNKS, **options)
        self.loop = MovingSequential(layers, [device for device in devices for _ in range(2)])
        self.device = devices[0]

    def step(self, number: int) -> list[str]:
        """Trains both one step, and returns what differs."""
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number)).to(self.device)
        with autocast():
            mark("forward")
            ours = self.pipe(x)
            mark("other")
            plain = plain_loop(self.loop, x, CHUNKS)
        gradient = torch.randn_like(plain)
        mark("backward")
        ours.backward(gradient)
        mark("other")
        plain.backward(gradient)
        found = [] if torch.equal(ours.cpu(), plain.cpu()) else [f"output {number}"]
        pairs = list(zip(self.pipe.parameters(), self.loop.parameters(), strict=True))
        for index, (own, expected) in enumerate(pairs):
            if not torch.equal(own.grad.cpu(), expected.grad.cpu()):
                found.append(f"gradient {index} of step {number}")
        with torch.no_grad():  # the next step must cast new values
            for index, pair in enumerate(pairs):
                for parameter in pair:
                    parameter.mul_(0.9 + 0.01 * index)
                    parameter.grad = None
        return found

    def bytes(self) -> list[int]:
        """Returns the bytes allocated between forward and backward, after it, and after two failed steps."""
        x = torch.randn(BATCH, WIDTH).to(self.device)
        self._train(x)  # makes the plan
        found = [*self._train(x)]
        for action in ("1F1", "0B1"):
            inject_failure(self.pipe, action)
            with pytest.raises(ValueError, match=action):
                self._train(x)
            remove_faults(self.pipe)
            found.append(torch.cuda.memory_allocated(self.device))
        return found

    def _train(self, x: Tensor) -> tuple[int, int]:
        with autocast():
            y = self.pipe(x)
        between = torch.cuda.memory_allocated(self.device)
        y.sum().backward()
        self.pipe.zero_grad()
        del y
        return between, torch.cuda.memory_allocated(self.device)


def bytes_without_loop(model: str, devices: list[str], checkpoint: str, hoist: bool) -> list[int]:
    with with_hoisted_casts(hoist):
        before = torch.cuda.memory_allocated(devices[0])
        case = Case(model, devices, checkpoint, capture=False)
        return [count - before for count in case.bytes()]


def main() -> None:
    operators, model, devices, checkpoint, capture = sys.argv[1:]
    load(operators, deterministic=False)
    names = devices.split(",")
    case = Case(model, names, checkpoint, capture == "captured")
    with with_hoisted_casts():
        differences = [difference for step in range(STEPS) for difference in case.step(step)]
    result = {
        "differences": differences,
        "replays": sum(report.replays for report in pipeline_of(case.pipe).graph_reports()),
        "parameters": [hex(p.data_ptr()) for p in case.pipe.parameters()],
        "hoisted": bytes_without_loop(model, names, checkpoint, True),
        "plain": bytes_without_loop(model, names, checkpoint, False),
    }
    print(json.dumps(result))
    # Skips destructors of static objects, which may run while autograd's threads are still alive.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

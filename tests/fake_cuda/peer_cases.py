"""Pipelines on many fake devices; run by test_peers.py on the fake runtime.

`peer_cases.py OPERATORS COUNT TRANSPORT ORDER...`: for each ORDER, makes a pipeline with a stage on each
of COUNT devices, ``i * ORDER % COUNT``. The first stage and the last one have a skip connection, the second
and the last one share a weight. Compares mini-batches, the last of them captured, and a step with the plain
loop; prints warnings, doctor()'s lines on the transport, and "equal"; or the error if the pipeline cannot be
constructed. With the ORDER ``measured``, the first call chooses the balance, of layers without skip and tie.
"""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import torch
from torch import nn

from gpipe_fast import GPipe, doctor
from tests.fake_cuda.fake_devices import gradients, load, mark, plain_loop
from tests.fake_cuda.train_models import PopSkip, StashSkip, TiedLinear
from tests.internals import pipeline_of

BATCH, CHUNKS, WIDTH = 4, 2, 6
NUM_MINIBATCHES = 3  # the last one is captured


def layers(count: int) -> nn.Sequential:
    shared = nn.Linear(WIDTH, WIDTH)
    between = [nn.Linear(WIDTH, WIDTH) for _ in range(count - 3)]
    return nn.Sequential(StashSkip(), shared, *between, nn.Sequential(PopSkip(), TiedLinear(shared)))


def make(count: int, transport: str, order: str) -> tuple[nn.Sequential, GPipe]:
    """Returns a plain model, and a pipeline with a copy of it."""
    measured = order == "measured"
    devices = [f"cuda:{i * (1 if measured else int(order)) % count}" for i in range(count)]
    torch.manual_seed(0)
    plain = layers(count)
    if measured:
        plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2 * count)))
    balance = None if measured else [1] * count
    options: dict[str, Any] = {"devices": devices, "chunks": CHUNKS, "transport": transport, "capture": True}
    return plain, GPipe(copy.deepcopy(plain), balance, **options)


def differences(plain: nn.Module, pipeline: GPipe) -> list[str]:
    """Returns what differs from the plain loop in mini-batches and in a step."""
    found = []
    x = torch.randn(BATCH, WIDTH)
    expected = plain_loop(plain, x, CHUNKS)
    wanted = gradients(plain, expected)

    def compare(what: str, own: list[torch.Tensor]) -> None:
        # The order of additions to a shared gradient is not that of the plain loop.
        if not all(map(torch.allclose, own, wanted)):
            found.append(what)

    for number in range(NUM_MINIBATCHES):
        mark("plan" if number < NUM_MINIBATCHES - 1 else "begin\tmay wait")
        output = pipeline(x.to(pipeline.devices[0]))
        compare(f"gradients of mini-batch {number}", gradients(pipeline, output))
        mark("end")
        if not torch.equal(output.cpu(), expected):
            found.append(f"output of mini-batch {number}")
    reports = pipeline_of(pipeline).graph_reports()
    if [(report.replays, report.obstacle) for report in reports] != [(1, "")]:
        found.append(f"graphs {[(report.replays, report.obstacle) for report in reports]}")
    pipeline.zero_grad()
    pipeline.step(x.to(pipeline.devices[0]), loss_fn=lambda y: y.square().sum(), normalizer=1)
    compare("gradients of the step", [p.grad.cpu() for p in pipeline.parameters() if p.grad is not None])
    return found


def main() -> None:
    operators, count, transport, *orders = sys.argv[1:]
    load(operators)
    for order in orders:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                plain, pipeline = make(int(count), transport, order)
            except ValueError as error:
                print(error)
                continue
            found = differences(plain, pipeline)
        for warning in caught:
            if "leave the stages idle" not in str(warning.message):
                print(f"warning: {warning.message}")
        print(doctor(pipeline).partition("\ntransport\n")[2].partition("\n\n")[0])
        print("; ".join(found) or "equal")


if __name__ == "__main__":
    main()

"""What a call costs before any stage runs: to find out that nothing changed, and to meet new lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.measure import Table, alternate, report
from bench.peers import looped
from gpipe_fast import GPipe
from gpipe_fast.demo_model import gpt

SIZES = (10, 500)
STEPS, LENGTHS = 100, range(8, 136, 8)
CHUNKS, BATCH = 4, 8


class _Instead:
    """Stands for a C++ pipeline whose forward takes no time."""

    def __init__(self, outputs: list[Tensor]) -> None:
        self._outputs = outputs

    def forward(self, *arguments: object) -> list[Tensor]:
        return self._outputs


def unchanged(num_modules: int, rounds: int, calls: int) -> list[object]:
    """Median µs of a call's parts, the second call and later ones of a pipeline of so many modules."""
    layers = [nn.Linear(8, 8) if index % 2 == 0 else nn.ReLU() for index in range(num_modules)]
    half = num_modules // 2
    pipe, input = GPipe(nn.Sequential(*layers), [half, num_modules - half], chunks=8), torch.randn(8, 8)
    stub = deepcopy(pipe)
    with torch.no_grad():
        pipe(input)
        output = stub(input)
        assert torch.equal(output, pipe(input))
        stub._pipeline = _Instead([output])  # type: ignore[assignment]
        timings = alternate(
            {"look": pipe._look, "python": lambda: stub(input), "whole": lambda: pipe(input)}, rounds, calls
        )
        assert stub(input) is output
    return [num_modules, len(list(pipe.parameters())), *map(str, timings.values())]


@contextmanager
def _timed(owner: Any, name: str) -> Iterator[list[float]]:
    """Seconds of every call of a method inside the block."""
    method: Callable[..., Any] = getattr(owner, name)
    taken: list[float] = []

    def timed(*arguments: object) -> Any:
        start = time.perf_counter()
        try:
            return method(*arguments)
        finally:
            taken.append(time.perf_counter() - start)

    setattr(owner, name, timed)
    try:
        yield taken
    finally:
        delattr(owner, name)


def lengths(steps: int, among: range, width: int = 64) -> list[object]:
    """One row: steps on sequences of lengths drawn at random, each compared with the plain loop's."""
    generator = torch.Generator().manual_seed(0)
    plain = gpt(width, layers=4, heads=4, length=max(among))
    pipe = GPipe(deepcopy(plain), [3, 3], chunks=CHUNKS)
    pipe.threads_per_stage = 1
    seconds: list[float] = []
    drawn: list[int] = []
    with _timed(pipe._planner, "_make") as making:
        for _ in range(steps):
            drawn.append(among[int(torch.randint(len(among), (), generator=generator))])
            text = torch.randint(256, (BATCH, drawn[-1] + 1), generator=generator)
            start = time.perf_counter()
            loss = _step(pipe, pipe, text)
            seconds.append(time.perf_counter() - start)
            assert torch.equal(loss, _step(plain, looped(plain, CHUNKS), text)), f"loss at length {drawn[-1]}"
            for (name, ours), wanted in zip(pipe.named_parameters(), plain.parameters(), strict=True):
                assert ours.grad is not None
                assert wanted.grad is not None
                assert torch.equal(ours.grad, wanted.grad), f"gradient of {name} at length {drawn[-1]}"
    compiler = pipe._planner._programs.compiler
    return [
        steps,
        len(set(drawn)),
        len(making),
        compiler.num_traces,
        sum(making),
        sum(making) / len(making),
        sum(seconds) - sum(making),
    ]


def _step(model: nn.Module, forward: Callable[[Tensor], Tensor], text: Tensor) -> Tensor:
    model.zero_grad()
    logits = forward(text[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report(
        "signature",
        "What a call costs before any stage runs",
        ["modules", "parameters", "look for changes", "all Python of a call", "whole call"],
        [unchanged(size, rounds=40, calls=20) for size in SIZES],
        "µs, medians [p20, p80] of calls in which nothing has changed. Linear(8, 8) and ReLU in turn, two "
        "stages, 8 micro-batches of one sample, under no_grad. All Python is a whole call, with the look, of "
        "a pipeline whose C++ part returns at once.\n",
        [
            Table(
                "Sequences of changing length",
                [
                    "steps",
                    "lengths",
                    "plans made",
                    "traces",
                    "seconds lost making plans",
                    "seconds a plan",
                    "seconds of all else",
                ],
                [lengths(STEPS, LENGTHS)],
                f"A GPT of 4 blocks of width 64 trained for {STEPS} steps on {BATCH} sequences in {CHUNKS} "
                f"micro-batches, all of one length, drawn from {len(LENGTHS)} between {LENGTHS[0]} and "
                f"{LENGTHS[-1]}. Two stages, default checkpointing, one thread. Making a plan is tracing, "
                "lowering and building. In every step loss and gradients equalled the plain loop's, bit for "
                "bit.\n",
            )
        ],
    )


if __name__ == "__main__":
    main()

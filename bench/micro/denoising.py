"""Denoising of images by a Diffusion Transformer: `stream` with feedback compared with calls.

A DiT of {BLOCKS} blocks of width {WIDTH} for latents of {SIDE} x {SIDE}, K = {STAGES} stages on the CPU with
one thread each, {IMAGES} images in {STEPS} steps each, every image a mini-batch in one micro-batch. 'depth'
images are denoised at the same time; calls denoise one after the other. Candidates take turns in {ROUNDS}
rounds; medians. 'First image' is the time until it has had all steps: the median of {FIRST_IMAGES}. Latents
equal those of the plain model bit for bit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.measure import Ratio, report, samples, timing
from bench.models.dit import DiT
from gpipe_fast import GPipe

BLOCKS, WIDTH, HEADS, SIDE, STAGES = 40, 128, 4, 16, 2
IMAGES, STEPS, ROUNDS, FIRST_IMAGES = 8, 8, 3, 3
DEPTHS = (1, 2, 4, 8)
CALLS = "calls"


def update(latents: Tensor, noise: Tensor) -> Tensor:
    """Returns latents with a part of the predicted noise removed."""
    return latents - noise / STEPS


def by_calls(model: Any, images: Sequence[Tensor]) -> Iterator[Tensor]:
    """Denoises one image after the other."""
    for latents in images:
        for step in range(STEPS):
            latents = update(latents, model(latents, torch.full((len(latents),), STEPS - step)))
        yield latents


def by_stream(model: Any, images: Sequence[Tensor], depth: int) -> Iterator[Tensor]:
    """Denoises ``depth`` images at the same time."""
    waiting = iter(images)
    ready, in_flight = deque[tuple[Tensor, int]](), deque[tuple[Tensor, int]]()

    def requests() -> Iterator[Any]:
        while True:
            if ready:
                latents, step = ready.popleft()
            elif (new := next(waiting, None)) is not None:
                latents, step = new, 0
            elif in_flight:
                yield None
                continue
            else:
                return
            in_flight.append((latents, step))
            yield latents, torch.full((len(latents),), STEPS - step)

    for noise in model.stream(requests(), depth=depth):
        latents, step = in_flight.popleft()
        latents = update(latents, noise)
        if step + 1 < STEPS:
            ready.append((latents, step + 1))
        else:
            yield latents


@torch.no_grad()
def rows() -> list[list[object]]:
    """Measures the candidates; checks that latents equal those of the plain model."""
    torch.manual_seed(0)
    plain = DiT(BLOCKS, WIDTH, HEADS, SIDE).eval()
    images = [torch.randn(1, 4, SIDE, SIDE) for _ in range(IMAGES)]
    example = images[0], torch.ones(1, dtype=torch.long)
    balance = [BLOCKS // STAGES] * STAGES
    model = GPipe.from_model(
        plain, example, blocks="blocks", balance=balance, devices=["cpu"] * STAGES, chunks=1, backend="aten"
    )
    model.threads_per_stage = 1
    candidates = {CALLS: partial(by_calls, model, images)} | {
        f"stream, depth={depth}": partial(by_stream, model, images, depth) for depth in DEPTHS
    }
    expected = list(by_calls(plain, images))
    for name, run in candidates.items():
        assert all(map(torch.equal, run(), expected)), f"{name}: latents differ from the plain model's"
    found = samples({name: lambda r=run: list(r()) for name, run in candidates.items()}, ROUNDS)  # type: ignore[misc]

    def first_image(name: str) -> float:
        begin = time.perf_counter()
        next(candidates[name]())
        return (time.perf_counter() - begin) * 1e3

    return [
        [
            name,
            f"{IMAGES / timing(times).median * 1e6:.2f}",
            str(Ratio.of(found[CALLS], times)),
            f"{median(first_image(name) for _ in range(FIRST_IMAGES)):.0f}",
        ]
        for name, times in found.items()
    ]


def main() -> None:
    torch.set_num_threads(1)
    report(globals(), ["candidate", "images per s", "relative to calls", "first image, ms"], rows())

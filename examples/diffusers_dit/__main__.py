"""Denoises images with a DiT of diffusers over several stages, several images at the same time."""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from examples.shared.options import Options
from gpipe_fast import GPipe

try:
    from diffusers import DDIMScheduler, DiTTransformer2DModel
except ImportError as error:
    raise SystemExit(f"this example needs diffusers: pip install diffusers ({error})") from None

QUICK = {"blocks": 8, "width": 32, "steps": 4, "images": 3}
HEADS, SIDE, CHANNELS, CLASSES = 4, 8, 4, 10


class Denoising:
    """Images of random classes, which a DiT with random weights denoises by DDIM.

    Args:
        args: the options.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.plain = DiTTransformer2DModel(
            num_attention_heads=HEADS,
            attention_head_dim=args.width // HEADS,
            in_channels=CHANNELS,
            num_layers=args.blocks,
            sample_size=SIDE,
            num_embeds_ada_norm=CLASSES,
        ).eval()
        self.images = [torch.randn(1, CHANNELS, SIDE, SIDE) for _ in range(args.images)]
        self.classes = [torch.randint(CLASSES, (1,)) for _ in range(args.images)]
        self.scheduler = DDIMScheduler()
        self.scheduler.set_timesteps(args.steps)

    def arguments(self, image: int, latents: Tensor, step: int) -> dict[str, Tensor]:
        """Returns the arguments of the model's call for a step of an image."""
        timestep = self.scheduler.timesteps[step].expand(1)
        return {"hidden_states": latents, "timestep": timestep, "class_labels": self.classes[image]}

    def update(self, latents: Tensor, output: Any, step: int) -> Tensor:
        """Returns the latents after a step; DDIM keeps no state between steps."""
        found: Tensor = self.scheduler.step(
            output.sample, self.scheduler.timesteps[step], latents
        ).prev_sample
        return found

    @torch.no_grad()
    def by_calls(self, model: Any) -> Iterator[Tensor]:
        """Denoises one image after the other."""
        for image, latents in enumerate(self.images):
            for step in range(len(self.scheduler.timesteps)):
                latents = self.update(latents, model(**self.arguments(image, latents, step)), step)
            yield latents

    def by_stream(self, model: Any, depth: int) -> Iterator[Tensor]:
        """Denoises ``depth`` images at the same time."""
        waiting = enumerate(self.images)
        ready, in_flight = deque[tuple[int, Tensor, int]](), deque[tuple[int, Tensor, int]]()

        def requests() -> Iterator[dict[str, Tensor] | None]:
            while True:
                if ready:
                    request = ready.popleft()
                elif (new := next(waiting, None)) is not None:
                    request = *new, 0
                elif in_flight:
                    yield None  # the next request depends on a result
                    continue
                else:
                    return
                in_flight.append(request)
                yield self.arguments(*request)

        for output in model.stream(requests(), depth=depth):
            image, latents, step = in_flight.popleft()
            latents = self.update(latents, output, step)
            if step + 1 < len(self.scheduler.timesteps):
                ready.append((image, latents, step + 1))
            else:
                yield latents


def main(argv: Sequence[str] | None = None) -> None:
    """Denoises by calls of the plain model, by calls of the pipeline, and by its stream."""
    began = time.perf_counter()
    args = parse(argv)
    torch.manual_seed(args.seed)
    denoising = Denoising(args)
    model = new_pipeline(denoising, args)
    print(f"model: {type(model).__name__}, {args.blocks} blocks; layers per stage: {model.balance}")
    expected = list(denoising.by_calls(denoising.plain))
    print(f"\n{args.images} images, {args.steps} steps each; time of all, and until the first is done:")
    ways = {"calls": denoising.by_calls(model)}
    ways |= {f"stream, depth={depth}": denoising.by_stream(model, depth) for depth in args.depths}
    for name, way in ways.items():
        begin = time.perf_counter()
        found = [next(way)]
        first = time.perf_counter() - begin
        found += way
        whole = time.perf_counter() - begin
        equal = "equal bit for bit" if all(map(torch.equal, found, expected)) else "DIFFERENT"
        print(f"  {name:16} {whole:6.2f} s, {first:6.2f} s; the plain model's latents: {equal}")
    print(
        f"\nfinished in {time.perf_counter() - began:.0f} s\n"
        "Shown: images in flight fill the stages, which calls leave idle; a depth above the number of\n"
        "stages only makes the first image later. Look next at\n"
        "- `by_stream` in examples/diffusers_dit/__main__.py;\n"
        "- docs/guide/stream.md: what depth means."
    )


def new_pipeline(denoising: Denoising, args: argparse.Namespace) -> Any:
    """Makes a pipeline of the model, with its first layers traced by a call."""
    example = denoising.arguments(0, denoising.images[0], 0)
    model = GPipe.from_model(
        denoising.plain, kwargs=example, devices=["cpu"] * args.stages, chunks=1, backend="aten"
    )
    model.threads_per_stage = 1
    next(denoising.by_calls(model))
    return model


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses and checks the command line."""
    options = Options(
        "diffusers_dit",
        __doc__,
        QUICK,
        images=(8, "images to denoise"),
        steps=(10, "steps of each image"),
        blocks=(40, "blocks of the model"),
        width=(128, "size of the hidden states"),
        stages=(2, "stages of the pipeline, on the CPU"),
        depths=([1, 2, 4], "numbers of images at the same time"),
        seed=(0, "random seed of weights and latents"),
    )
    args = options.read(argv)
    if args.width % HEADS:
        options.error(f"--width must be a multiple of the {HEADS} heads, got {args.width}")
    torch.set_num_threads(1)
    return args


if __name__ == "__main__":
    main()

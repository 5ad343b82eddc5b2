"""A U-Net as a pipeline: its skip connections go directly from the stage that stashes to the stage that pops.

Read from top to bottom: the layers, the model, the same model in plain PyTorch, the data, then `main`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import OrderedDict
from collections.abc import Generator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe, doctor
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.skip import Namespace, pop, skippable, stash, verify_skippables

CLASSES = ["background", "disc", "square"]
LEVELS = 3  # each halves height and width
HELD_OUT_IMAGES = 96
QUICK = {"steps": 40, "size": 32, "width": 8}


def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    """Two 3 x 3 convolutions. Group norm does not depend on micro-batches, unlike batch norm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(4, outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(4, outputs),
        nn.ReLU(),
    )


@skippable(stash=["skip"])
class Down(nn.Module):
    """One level of the encoder: stashes its features, and returns them at half the resolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolutions = convolutions(inputs, outputs)

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        """(batch, inputs, height, width) to (batch, outputs, height / 2, width / 2)."""
        x = self.convolutions(x)
        yield stash("skip", x)
        return F.max_pool2d(x, 2)


@skippable(pop=["skip"])
class Up(nn.Module):
    """One level of the decoder: doubles the resolution, and joins the encoder's features."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolutions = convolutions(inputs + outputs, outputs)

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        """(batch, inputs, height / 2, width / 2) to (batch, outputs, height, width)."""
        skip = yield pop("skip")
        joined: Tensor = self.convolutions(torch.cat([F.interpolate(x, scale_factor=2), skip], dim=1))
        return joined


def unet(width: int) -> nn.Sequential:
    """Returns the U-Net as 8 layers: down0, down1, down2, bottom, up2, up1, up0, head."""
    widths = [width << level for level in range(LEVELS)]
    # Every level stashes "skip": its namespace tells which Up gets the tensor of which Down.
    spaces = [Namespace() for _ in widths]
    layers = OrderedDict[str, nn.Module]()
    for level, (inputs, outputs) in enumerate(zip([3, *widths], widths, strict=False)):
        layers[f"down{level}"] = Down(inputs, outputs).isolate(spaces[level])
    layers["bottom"] = convolutions(widths[-1], 2 * widths[-1])
    for level in reversed(range(LEVELS)):
        layers[f"up{level}"] = Up(2 * widths[level], widths[level]).isolate(spaces[level])
    layers["head"] = nn.Conv2d(width, len(CLASSES), 1)
    model = nn.Sequential(layers)
    verify_skippables(model)  # every stash has its pop; GPipe checks this, too
    return model


class PlainUNet(nn.Module):
    """The same functions as one would write them without a pipeline: a forward that keeps the skips."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width << level for level in range(LEVELS)]
        for level, (inputs, outputs) in enumerate(zip([3, *widths], widths, strict=False)):
            self.add_module(f"down{level}", convolutions(inputs, outputs))
            self.add_module(f"up{level}", convolutions(3 * outputs, outputs))
        self.bottom = convolutions(widths[-1], 2 * widths[-1])
        self.head = nn.Conv2d(width, len(CLASSES), 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, height, width) to logits (batch, classes, height, width)."""
        skips = []
        for level in range(LEVELS):
            x = getattr(self, f"down{level}")(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for level in reversed(range(LEVELS)):
            x = torch.cat([F.interpolate(x, scale_factor=2), skips[level]], dim=1)
            x = getattr(self, f"up{level}")(x)
        return cast(Tensor, self.head(x))


def plain_name(name: str) -> str:
    """Renames down0.module.convolutions.0.weight to down0.0.weight; `skippable` wraps a class."""
    return name.replace("module.convolutions.", "")


def drawn_shapes(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws a disc and a square into each noisy image, where either may cover the other.

    Returns:
        The images, (count, 3, size, size), and the class of every pixel, (count, size, size).
    """
    position = torch.arange(size, dtype=torch.float32)
    classes = torch.zeros(count, size, size, dtype=torch.long)
    images = torch.zeros(count, 3, size, size)
    for shape in (1, 2):
        centre = size * (0.2 + 0.6 * torch.rand(2, count, 1, 1, generator=generator))
        radius = size * (0.12 + 0.1 * torch.rand(count, 1, 1, generator=generator))
        across, down = position[None, None, :] - centre[0], position[None, :, None] - centre[1]
        distance = across.hypot(down) if shape == 1 else across.abs().maximum(down.abs())
        inside = distance < radius
        red, blue = (0.8, 0.0) if shape == 1 else (0.0, 0.8)  # a hint: discs tend to red, squares to blue
        hint = torch.tensor([red, 0.3, blue])[:, None, None]
        colour = hint + 0.7 * torch.rand(count, 3, 1, 1, generator=generator)
        classes[inside] = shape
        images = torch.where(inside[:, None], colour, images)
    return images + 0.2 * torch.randn(images.shape, generator=generator), classes


def main(argv: Sequence[str] | None = None) -> None:
    """Trains a U-Net as a pipeline, and compares it with the plain U-Net."""
    args = parse_arguments(argv)
    torch.manual_seed(args.seed)
    # Sums of floats depend on the number of threads: the plain model gets as many as one stage.
    torch.set_num_threads(max(1, args.threads // len(args.balance)))
    data = torch.Generator().manual_seed(args.seed)

    devices = ["cpu"] * len(args.balance)
    model = GPipe(
        unet(args.width), args.balance, devices=devices, chunks=args.chunks, checkpoint=args.checkpoint
    )
    model.threads_per_stage = torch.get_num_threads()
    print_setup(model, args)
    images, classes = drawn_shapes(args.batch, args.size, data)
    compare_a_step(model, PlainUNet(args.width), images.chunk(args.chunks), classes)
    print_connections(model)
    train(model, args, data)
    print("\nShown: a U-Net in stages; skip connections bypass the stages between, and no bit changes.")
    print("Next: docs/guide/skip_connections.md; try --balance 1 1 1 1 1 1 1 1, or --checkpoint always.")


def print_setup(model: GPipe, args: argparse.Namespace) -> None:
    """Prints the model, its cut and the step."""
    names = [name for name, _ in model.named_children()]
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"model: U-Net, {parameters:,} parameters, images of {args.size} x {args.size}; "
        f"balance={model.balance}:"
    )
    begin = 0
    for stage, count in enumerate(model.balance):
        print(f"  stage {stage} on {model.devices[stage]}: {', '.join(names[begin : begin + count])}")
        begin += count
    microbatches = len(torch.empty(args.batch).chunk(args.chunks))
    print(
        f"step: {args.batch} images in {microbatches} micro-batches, checkpoint={model.checkpoint!r}",
        flush=True,
    )


def compare_a_step(model: GPipe, plain: PlainUNet, parts: Sequence[Tensor], classes: Tensor) -> None:
    """Compares output, loss and gradients with a loop over micro-batches of the plain U-Net."""
    plain.load_state_dict({plain_name(name): tensor for name, tensor in model.state_dict().items()})
    output = model(torch.cat([*parts]))
    loss = F.cross_entropy(output, classes)
    loss.backward()
    plain_output = torch.cat([plain(part) for part in parts])
    plain_loss = F.cross_entropy(plain_output, classes)
    plain_loss.backward()

    ours = {plain_name(name): gradient(p) for name, p in model.named_parameters()}
    equal = [torch.equal(ours[name], gradient(p)) for name, p in plain.named_parameters()]
    print("\none step, compared with a loop over micro-batches of the plain U-Net:")
    require(torch.equal(output, plain_output), f"  the output, {tuple(output.shape)}")
    require(torch.equal(loss, plain_loss), f"  the loss, {loss.item():.6f}")
    require(all(equal), f"  {len(equal)} gradients")
    model.zero_grad()


def print_connections(model: GPipe) -> None:
    """Prints from which stage to which stage tensors go, as `doctor` reports it."""
    lines = [
        line.strip() for line in doctor(model).splitlines() if re.match(r"\s*stage \d+ .*-> stage", line)
    ]
    print("\nconnections, from doctor(model); hand-over: on one device, nothing is copied:")
    print("\n".join(f"  {line}" for line in lines) or "  none, because there is one stage")
    if len(model.balance) > 2:
        print(
            "  A skip connection goes straight to the stage that pops it; stages between do not receive it."
        )


def train(model: GPipe, args: argparse.Namespace, data: torch.Generator) -> None:
    """Trains the model on new images in each step; prints the loss and the IoU on held-out images."""
    held_out = drawn_shapes(HELD_OUT_IMAGES, args.size, torch.Generator().manual_seed(args.seed + 1))
    weight = torch.tensor([0.3, 1.0, 1.0])  # most pixels are background: they count less
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    print(f"\ntraining; IoU (intersection over union) on {HELD_OUT_IMAGES} held-out images:")
    print(f"  before: {ious(model, held_out, args.batch)}", flush=True)
    for step in range(1, args.steps + 1):
        images, classes = drawn_shapes(args.batch, args.size, data)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), classes, weight)
        loss.backward()
        optimizer.step()
        if step % max(1, args.steps // 4) == 0 or step == args.steps:
            print(f"  step {step}: loss {loss.item():.3f}, {ious(model, held_out, args.batch)}", flush=True)


@torch.no_grad()
def ious(model: nn.Module, held_out: tuple[Tensor, Tensor], batch: int) -> str:
    """Returns, for each class, the pixels common to prediction and truth, divided by the pixels of either."""
    images, classes = held_out
    model.eval()
    predicted = torch.cat([model(part).argmax(dim=1) for part in images.split(batch)])
    model.train()
    found = []
    for index, name in enumerate(CLASSES):
        ours, truth = predicted == index, classes == index
        found.append(f"{name} {(ours & truth).sum() / (ours | truth).sum():.2f}")
    return ", ".join(found)


def require(equal: bool, what: str) -> None:
    """Prints that two results are equal; ends the program if they are not."""
    print(f"{what}: {'equal bit for bit' if equal else 'NOT EQUAL'}", flush=True)
    if not equal:
        sys.exit(1)


def gradient(parameter: nn.Parameter) -> Tensor:
    """Returns a parameter's gradient after a backward."""
    assert parameter.grad is not None
    return parameter.grad


def positive(word: str) -> int:
    """Parses a number of the command line that must be at least 1."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def command_line() -> argparse.ArgumentParser:
    """Returns the argument parser."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.unet",
        description="Trains a U-Net with skip connections as a pipeline, on shapes drawn on the spot.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add, threads = parser.add_argument, torch.get_num_threads()
    quick = " ".join(f"--{name} {value}" for name, value in QUICK.items())
    add("--steps", type=positive, metavar="N", default=200, help="training steps, each on one mini-batch")
    balance: dict[str, Any] = {"nargs": "+", "metavar": "N", "default": [2, 3, 3]}
    add("--balance", type=positive, **balance, help="layers of each stage; they sum to 8")
    add("--chunks", type=positive, metavar="M", default=12, help="micro-batches per mini-batch")
    add("--checkpoint", choices=CHECKPOINT_MODES, default="except_last", help="which micro-batches recompute")
    add("--batch", type=positive, metavar="N", default=48, help="images per mini-batch")
    size = "height and width of the images, a multiple of 8"
    add("--size", type=positive, metavar="PIXELS", default=64, help=size)
    width = "channels of the first level, a multiple of 4"
    add("--width", type=positive, metavar="W", default=16, help=width)
    add("--seed", type=int, metavar="SEED", default=0, help="random seed of weights and images")
    together = "threads of all stages together, divided evenly"
    add("--threads", type=positive, metavar="T", default=threads, help=together)
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS}  # no default in the help
    add("--quick", action="store_true", **hidden, help=f"under a minute: other defaults, {quick}")
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses and checks the command line; ``--quick`` changes the defaults of steps, image size and width."""
    parser = command_line()
    args = parser.parse_args(argv)
    if "quick" in args:
        parser.set_defaults(**QUICK)
        args = parser.parse_args(argv)
    if sum(args.balance) != 8:
        parser.error(f"the model has 8 layers, but --balance sums to {sum(args.balance)}: {args.balance}")
    if args.size % 2**LEVELS or args.width % 4:
        parser.error(f"--size must be a multiple of 8 and --width of 4, got {args.size} and {args.width}")
    return args


if __name__ == "__main__":
    main()

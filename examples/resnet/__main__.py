"""torchvision's ResNet-50 as a pipeline: cut, compared, trained, evaluated, and loaded into the plain model.

Read `main` first; the functions that it calls follow in the same order.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck, ResNet  # type: ignore[import-untyped, unused-ignore]

from gpipe_fast import GPipe
from gpipe_fast.balance import balance_by_time
from gpipe_fast.gpipe import CHECKPOINT_MODES

CLASSES = 4  # stripes: horizontal or vertical, orange or blue
HELD_OUT_IMAGES = 256
LAST_BATCH_NORM = "layer4.2.bn3"
QUICK = {"steps": 16, "size": 32, "width": 16}


def main(argv: Sequence[str] | None = None) -> None:
    """Trains ResNet-50 as a pipeline, and says on the way what equals the plain model."""
    args = parse_arguments(argv)
    torch.manual_seed(args.seed)
    # Sums of floats depend on the number of threads: the plain model gets as many as one stage.
    torch.set_num_threads(max(1, args.threads // args.stages))
    data = torch.Generator().manual_seed(args.seed)

    resnet = ResNet(Bottleneck, [3, 4, 6, 3], CLASSES, width_per_group=args.width, zero_init_residual=True)
    plain = copy.deepcopy(resnet)  # to compare with
    layers = as_sequential(resnet)
    images, labels = striped_images(args.batch, args.size, data)
    microbatch = images.chunk(args.chunks)[0]
    balance = args.balance or balance_by_time(args.stages, layers, microbatch, timeout=0.5)
    # With deferred batch norm, the running statistics are updated once per mini-batch, not once per
    # micro-batch; see docs/guide/batch_norm.md.
    model = GPipe(
        layers,
        balance,
        devices=["cpu"] * len(balance),
        chunks=args.chunks,
        checkpoint=args.checkpoint,
        deferred_batch_norm=True,
    )
    model.threads_per_stage = torch.get_num_threads()
    print_setup(model, args)

    compare_a_step(model, plain, images.chunk(args.chunks), labels)
    train(model, args, data)
    compare_predictions(model, plain, args, data)
    print("\nShown: a torchvision model as a pipeline, and its weights back in the plain torchvision model.")
    print(
        "Next: docs/guide/batch_norm.md, on these statistics; python -m examples.unet, on skip connections."
    )


def as_sequential(resnet: ResNet) -> nn.Sequential:
    """Returns torchvision's own modules, in the order in which ResNet.forward calls them, as 18 layers."""
    stem = OrderedDict(conv1=resnet.conv1, bn1=resnet.bn1, relu=resnet.relu, maxpool=resnet.maxpool)
    blocks = [
        (f"layer{group}_{index}", block)  # torchvision's name is layer1.0, but a child's name has no dot
        for group in (1, 2, 3, 4)
        for index, block in enumerate(getattr(resnet, f"layer{group}"))
    ]
    head = OrderedDict(avgpool=resnet.avgpool, flatten=nn.Flatten(1), fc=resnet.fc)
    return nn.Sequential(OrderedDict([("stem", nn.Sequential(stem)), *blocks, ("head", nn.Sequential(head))]))


def with_torchvision_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames keys: stem.conv1.weight to conv1.weight, layer1_0.bn1.bias to layer1.0.bn1.bias."""
    renamed = {}
    for name, tensor in tensors.items():
        layer, rest = name.split(".", 1)
        renamed[rest if layer in ("stem", "head") else f"{layer.replace('_', '.')}.{rest}"] = tensor
    return renamed


def striped_images(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws noisy stripes, (count, 3, size, size), and their classes: direction and colour, (count,)."""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    position = torch.linspace(-1, 1, size)
    vertical = (labels % 2 == 1)[:, None, None]
    across = torch.where(vertical, position[None, None, :], position[None, :, None])
    frequency, phase = torch.rand(2, count, 1, 1, generator=generator)
    stripes = ((6 + 4 * frequency) * across + 2 * math.pi * phase).sin()[:, None]
    colour = torch.tensor([[1.0, 0.3, -0.5], [-0.5, 0.3, 1.0]])[labels // 2][:, :, None, None]
    noise = 0.5 * torch.randn(count, 3, size, size, generator=generator)
    return stripes * colour + noise, labels


def print_setup(model: GPipe, args: argparse.Namespace) -> None:
    """Prints the model, its cut and the step."""
    narrow = f" with width_per_group={args.width} instead of 64" if args.width != 64 else ""
    parameters = sum(p.numel() for p in model.parameters())
    names = [name for name, _ in model.named_children()]
    how = "as given" if args.balance else "by measured time"
    print(
        f"model: torchvision's ResNet-50{narrow}; {parameters:,} parameters in {len(model)} layers, "
        f"images of {args.size} x {args.size}"
    )
    print(f"cut {how}, balance={model.balance}:")
    begin = 0
    for stage, count in enumerate(model.balance):
        print(f"  stage {stage} on {model.devices[stage]}: {names[begin]} to {names[begin + count - 1]}")
        begin += count
    sizes = [len(part) for part in torch.empty(args.batch).chunk(args.chunks)]
    print(
        f"step: {args.batch} images in micro-batches of {sizes}, checkpoint={model.checkpoint!r}", flush=True
    )


def compare_a_step(model: GPipe, plain: ResNet, parts: Sequence[Tensor], labels: Tensor) -> None:
    """Compares loss, gradients and running statistics of a step with those of torchvision's plain model."""
    whole = copy.deepcopy(plain)
    loop = copy.deepcopy(plain)
    images = torch.cat([*parts])

    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    loop_loss = F.cross_entropy(torch.cat([loop(part) for part in parts]), labels)
    loop_loss.backward()
    whole_loss = F.cross_entropy(whole(images), labels)
    whole_loss.backward()

    ours = with_torchvision_names({name: gradient(p) for name, p in model.named_parameters()})
    equal = [torch.equal(ours[name], gradient(p)) for name, p in loop.named_parameters()]
    print("\none step, compared with torchvision's model:")
    print(
        f"  loss: {loss.item():.6f}; plain loop over {len(parts)} micro-batches: {loop_loss.item():.6f}; ",
        end="",
    )
    print(f"plain model on the whole mini-batch: {whole_loss.item():.6f}")
    require(torch.equal(loss, loop_loss), "  the loss and the loop's loss")
    require(all(equal), f"  {len(equal)} gradients and the loop's gradients")
    print(
        "  the whole mini-batch differs, because batch norm normalises each micro-batch by its own statistics"
    )

    statistics = with_torchvision_names(dict(model.named_buffers()))
    counts = [s["bn1.num_batches_tracked"] for s in (statistics, buffers(loop), buffers(whole))]
    updates = "{} (deferred_batch_norm=True); loop: {}; whole mini-batch: {}".format(*counts)
    print(f"  updates of the running statistics: {updates}")
    for name in ("bn1", LAST_BATCH_NORM):
        difference = (statistics[f"{name}.running_var"] - buffers(whole)[f"{name}.running_var"]).abs().max()
        print(f"  running_var of {name}: differs from the whole mini-batch's by at most {difference:.1g}")
    print("  (the first batch norm sees the same values; later ones see differently normalised values)")
    model.zero_grad()


def train(model: GPipe, args: argparse.Namespace, data: torch.Generator) -> None:
    """Trains the model on new images in each step; prints the loss and the accuracy on held-out images."""
    held_out = striped_images(HELD_OUT_IMAGES, args.size, torch.Generator().manual_seed(args.seed + 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    print(f"\ntraining; accuracy on {HELD_OUT_IMAGES} held-out images of {CLASSES} classes:")
    print(f"  before: {accuracy(model, held_out, args.batch):.1%}", flush=True)
    for step in range(1, args.steps + 1):
        images, labels = striped_images(args.batch, args.size, data)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % max(1, args.steps // 4) == 0 or step == args.steps:
            found = accuracy(model, held_out, args.batch)
            print(f"  step {step}: loss {loss.item():.3f}, accuracy {found:.1%}", flush=True)


@torch.no_grad()
def accuracy(model: nn.Module, held_out: tuple[Tensor, Tensor], batch: int) -> float:
    """Returns the fraction of right answers in eval mode, where batch norm uses its running statistics."""
    images, labels = held_out
    model.eval()
    found = torch.cat([model(part).argmax(dim=1) for part in images.split(batch)])
    model.train()
    return (found == labels).float().mean().item()


@torch.no_grad()
def compare_predictions(model: GPipe, plain: ResNet, args: argparse.Namespace, data: torch.Generator) -> None:
    """Loads the trained weights into torchvision's plain model, and compares their outputs in eval mode."""
    plain.load_state_dict(with_torchvision_names(model.state_dict()))
    model.eval()
    plain.eval()
    images, _ = striped_images(args.batch, args.size, data)
    ours, whole = model(images), plain(images)
    loop = torch.cat([plain(part) for part in images.chunk(args.chunks)])
    same = (ours.argmax(dim=1) == whole.argmax(dim=1)).sum()
    print("\ntrained weights in torchvision's plain model, eval mode:")
    require(torch.equal(ours, loop), "  the logits and those of the plain loop over micro-batches")
    print(
        f"  plain model on the whole mini-batch: {same} of {len(images)} predictions are the same, ", end=""
    )
    print(f"logits differ by at most {(ours - whole).abs().max():.1g}")


def require(equal: bool, what: str) -> None:
    """Prints that two results are equal; ends the program if they are not."""
    print(f"{what}: {'equal bit for bit' if equal else 'NOT EQUAL'}", flush=True)
    if not equal:
        sys.exit(1)


def gradient(parameter: nn.Parameter) -> Tensor:
    """Returns a parameter's gradient after a backward."""
    assert parameter.grad is not None
    return parameter.grad


def buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the running statistics of a model, by name."""
    return dict(module.named_buffers())


def positive(word: str) -> int:
    """Parses a number of the command line that must be at least 1."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def command_line() -> argparse.ArgumentParser:
    """Returns the argument parser."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.resnet",
        description="Trains torchvision's ResNet-50 as a pipeline on images of coloured stripes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add, threads = parser.add_argument, torch.get_num_threads()
    quick = " ".join(f"--{name} {value}" for name, value in QUICK.items())
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS}  # no default in the help
    add("--steps", type=positive, metavar="N", default=100, help="training steps, each on one mini-batch")
    add("--stages", type=positive, metavar="K", default=2, help="stages, cut by measured time")
    balance = {"nargs": "+", "metavar": "N", **hidden}
    add("--balance", type=positive, **balance, help="layers of each stage, instead of --stages")
    add("--chunks", type=positive, metavar="M", default=8, help="micro-batches per mini-batch")
    add("--checkpoint", choices=CHECKPOINT_MODES, default="except_last", help="which micro-batches recompute")
    add("--batch", type=positive, metavar="N", default=64, help="images per mini-batch")
    add("--size", type=positive, metavar="PIXELS", default=64, help="height and width of the images")
    width = "torchvision's width_per_group; 64 is ResNet-50"
    add("--width", type=positive, metavar="W", default=64, help=width)
    add("--seed", type=int, metavar="SEED", default=0, help="random seed of weights and images")
    together = "threads of all stages together, divided evenly"
    add("--threads", type=positive, metavar="T", default=threads, help=together)
    add("--quick", action="store_true", **hidden, help=f"under a minute: other defaults, {quick}")
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses and checks the command line; ``--quick`` changes the defaults of steps, width and image size."""
    parser = command_line()
    args = parser.parse_args(argv)
    if "quick" in args:
        parser.set_defaults(**QUICK)
        args = parser.parse_args(argv)
    args.balance = getattr(args, "balance", None)
    if args.balance and sum(args.balance) != 18:
        parser.error(f"the model has 18 layers, but --balance sums to {sum(args.balance)}")
    args.stages = len(args.balance) if args.balance else args.stages
    if args.stages > 18:
        parser.error(f"cannot cut 18 layers into {args.stages} stages")
    if args.size <= 32 and len(torch.empty(args.batch).chunk(args.chunks)[-1]) == 1:
        parser.error("batch norm needs two values: for images of 32 pixels, two images per micro-batch")
    return args


if __name__ == "__main__":
    main()

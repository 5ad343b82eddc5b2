"""From torchgpipe to gpipe_fast: one changed import, the same numbers, an old checkpoint, and both timed.

Read `training_script` and `main` first. torchgpipe is imported in `main`, so that --help works without it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INPUTS, OUTPUTS, BLOCKS = 16, 4, 6
QUICK = {"steps": 40, "rounds": 10}


class Block(nn.Module):
    """A residual block over (batch, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Adds the branch's output to ``x``."""
        result: Tensor = x + self.branch(x)
        return result


def new_layers(args: argparse.Namespace) -> nn.Sequential:
    """Returns the model, with the same random weights in every call."""
    torch.manual_seed(args.seed)
    blocks = [Block(args.width) for _ in range(BLOCKS)]
    return nn.Sequential(nn.Linear(INPUTS, args.width), *blocks, nn.Linear(args.width, OUTPUTS))


def mini_batch(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns random inputs, and a smooth function of them as the targets."""
    x = torch.randn(batch, INPUTS, generator=generator)
    return x, (x[:, :OUTPUTS] * x[:, OUTPUTS : 2 * OUTPUTS]).sin()


class Run(NamedTuple):
    """What a training run leaves."""

    model: Any
    losses: list[float]
    output: Tensor
    gradients: list[Tensor]


def training_script(GPipe: Callable[..., Any], args: argparse.Namespace) -> Run:
    """An ordinary training script. Both libraries run exactly these lines: only ``GPipe`` differs."""
    layers = new_layers(args)
    devices = ["cpu"] * len(args.balance)
    model = GPipe(layers, args.balance, devices=devices, chunks=args.chunks, checkpoint=args.checkpoint)
    if hasattr(model, "threads_per_stage"):  # gpipe_fast would divide the threads among the stages
        model.threads_per_stage = torch.get_num_threads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(args.seed)
    losses = []
    for _ in range(args.steps):
        x, y = mini_batch(args.batch, data)
        optimizer.zero_grad()
        output = model(x)
        loss = F.mse_loss(output, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Run(model, losses, output.detach(), [p.grad for p in model.parameters()])


def main(argv: Sequence[str] | None = None) -> None:
    """Trains with both libraries, compares all numbers, loads a checkpoint, and times a step."""
    args = parse_arguments(argv)
    try:
        import torchgpipe  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        print("torchgpipe is not installed: pip install torchgpipe==0.0.7", file=sys.stderr)
        sys.exit(2)
    import gpipe_fast

    print(
        "the change in a training script:\n  - from torchgpipe import GPipe\n  + from gpipe_fast import GPipe"
    )
    print(
        f"both then run: {args.steps} steps of {args.batch} samples, balance={args.balance}, "
        f"chunks={args.chunks}, checkpoint={args.checkpoint!r}",
        flush=True,
    )
    # Sums of floats depend on the number of threads: both libraries get as many for each stage.
    torch.set_num_threads(max(1, args.threads // len(args.balance)))
    theirs = training_script(torchgpipe.GPipe, args)
    ours = training_script(gpipe_fast.GPipe, args)
    compare_training(theirs, ours)
    load_checkpoint(theirs.model, gpipe_fast.GPipe, args)
    time_steps(theirs.model, ours.model, args)
    print("\nShown: after one changed import, the same numbers; old checkpoints load, whatever the balance.")
    print("Next: docs/coming_from/torchgpipe.md lists what differs, what works now, and what is missing.")


def compare_training(theirs: Run, ours: Run) -> None:
    """Compares the two runs: the losses of all steps, then outputs, gradients and weights of the last one."""
    print("\n step   torchgpipe   gpipe_fast")
    last = len(ours.losses) - 1
    for step in sorted({0, last // 3, 2 * last // 3, last}):
        print(f"{step:5}   {theirs.losses[step]:10.6f}   {ours.losses[step]:10.6f}")
    weights = list(zip(theirs.model.parameters(), ours.model.parameters(), strict=True))
    gradients = list(zip(theirs.gradients, ours.gradients, strict=True))
    require(theirs.losses == ours.losses, f"the losses of all {len(ours.losses)} steps")
    require(torch.equal(theirs.output, ours.output), "the outputs of the last step")
    require(all(torch.equal(a, b) for a, b in gradients), f"its {len(gradients)} gradients")
    require(all(torch.equal(a, b) for a, b in weights), f"the {len(weights)} trained parameters")


def load_checkpoint(theirs: Any, GPipe: Callable[..., Any], args: argparse.Namespace) -> None:
    """Saves torchgpipe's state_dict, and loads it into a pipeline with another balance and a plain model."""
    balance = [1, len(theirs) - 1]
    model = GPipe(new_layers(args), balance, devices=["cpu", "cpu"], chunks=args.chunks)
    model.threads_per_stage = torch.get_num_threads()
    plain = new_layers(args)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "torchgpipe.pt")
        torch.save(theirs.state_dict(), path)
        state = torch.load(path)
    model.load_state_dict(state)  # accepts torchgpipe's keys, of any balance
    plain.load_state_dict(model.state_dict())  # our keys are those of the plain nn.Sequential

    print("\na checkpoint that torchgpipe saved:")
    print(f"  torchgpipe's last key: {list(state)[-1]}; gpipe_fast's: {list(model.state_dict())[-1]}")
    x, _ = mini_batch(args.batch, torch.Generator().manual_seed(args.seed + 1))
    for pipeline in (theirs, model):
        pipeline.eval()
    with torch.no_grad():
        expected, found = theirs(x), model(x)
        loop = torch.cat([plain(part) for part in x.chunk(args.chunks)])
    require(torch.equal(found, expected), f"  loaded with balance={balance}, the outputs")
    require(
        torch.equal(loop, expected), "  loaded into the plain nn.Sequential, the outputs over micro-batches"
    )
    theirs.train()


def time_steps(theirs: Any, ours: Any, args: argparse.Namespace) -> None:
    """Times forward and backward, in turn, so that other work on the machine slows down both."""
    candidates, threads = {"torchgpipe": theirs, "gpipe_fast": ours}, torch.get_num_threads()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    x, y = mini_batch(args.batch, torch.Generator().manual_seed(args.seed))
    for _ in range(2 + args.rounds):
        for name, model in candidates.items():
            model.zero_grad()
            begin = time.perf_counter()
            F.mse_loss(model(x), y).backward()
            times[name].append(time.perf_counter() - begin)
    print(f"\nforward and backward on this machine, now: medians of {args.rounds} steps each, taken in turn")
    for name, found in times.items():
        print(f"  {name}: {statistics.median(found[2:]) * 1e3:8.2f} ms")  # without the warm-up
    print(f"  both with {threads} intra-op thread(s) per stage; for stages on the CPU, torchgpipe runs one")
    print("  stage after the other, and gpipe_fast runs them at the same time. This says nothing about GPUs.")


def require(equal: bool, what: str) -> None:
    """Prints that two results are equal; ends the program if they are not."""
    print(f"{what}: {'equal bit for bit' if equal else 'NOT EQUAL'}", flush=True)
    if not equal:
        sys.exit(1)


def positive(word: str) -> int:
    """Parses a number of the command line that must be at least 1."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def command_line() -> argparse.ArgumentParser:
    """Returns the argument parser."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.torchgpipe_migration",
        description="Runs one training script with torchgpipe and with gpipe_fast, and compares them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add, threads = parser.add_argument, torch.get_num_threads()
    quick = " ".join(f"--{name} {value}" for name, value in QUICK.items())
    add("--steps", type=positive, metavar="N", default=300, help="training steps, each on one mini-batch")
    balance: dict[str, Any] = {"nargs": "+", "metavar": "N", "default": [4, 4]}
    add("--balance", type=positive, **balance, help="layers of each stage; they sum to 8")
    add("--chunks", type=positive, metavar="M", default=8, help="micro-batches per mini-batch")
    modes = ["always", "except_last", "never"]
    add("--checkpoint", choices=modes, default="except_last", help="which micro-batches recompute")
    add("--batch", type=positive, metavar="N", default=256, help="samples per mini-batch")
    add("--width", type=positive, metavar="W", default=128, help="width of a block")
    add("--rounds", type=positive, metavar="N", default=30, help="timed steps of each library")
    add("--seed", type=int, metavar="SEED", default=0, help="random seed of weights and data")
    together = "threads of all stages together, divided evenly"
    add("--threads", type=positive, metavar="T", default=threads, help=together)
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS}  # no default in the help
    add("--quick", action="store_true", **hidden, help=f"under a minute: other defaults, {quick}")
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses and checks the command line; ``--quick`` changes the defaults of steps and rounds."""
    parser = command_line()
    args = parser.parse_args(argv)
    if "quick" in args:
        parser.set_defaults(**QUICK)
        args = parser.parse_args(argv)
    if sum(args.balance) != BLOCKS + 2:
        parser.error(f"the model has {BLOCKS + 2} layers, but --balance sums to {sum(args.balance)}")
    return args


if __name__ == "__main__":
    main()

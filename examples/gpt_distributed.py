"""A small GPT with one stage in each process. It learns the source of argparse, and resumes after a failure.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else restarts find old addresses: pytorch#135712
    torchrun --standalone --nproc-per-node 2 --max-restarts 1 examples/gpt_distributed.py

Started again, it goes on from its last checkpoint, with any number of processes from one to six (the layers).
"""

from __future__ import annotations

import argparse
import inspect
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW, Optimizer

from gpipe_fast import GPipe

WIDTH, HEADS, LENGTH, BATCH = 64, 4, 64, 32
# Optimizer state under the names of parameters, so that any number of processes finds its own.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class Embed(nn.Module):
    """Token plus position embedding: (batch, length), bytes, to (batch, length, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeds windows of at most ``LENGTH`` bytes."""
        embedded: Tensor = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return embedded


class Block(nn.Module):
    """A pre-norm Transformer block with causal attention over (batch, length, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        hidden = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), *hidden, nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Adds the outputs of the attention and of the MLP to ``x``."""
        split = self.queries_keys_values(self.norm(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        mixed = F.scaled_dot_product_attention(*split.unbind(2), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp(x)
        return result


class Head(nn.Module):
    """Logits as ``cross_entropy`` takes them: (batch, length, width) to (batch, 256, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of the next byte at each position."""
        logits: Tensor = self.logits(self.norm(x))
        return logits.transpose(1, 2)


def batch(text: Tensor) -> tuple[Tensor, Tensor]:
    """Returns random windows of a text, and the next byte for each of theirs."""
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
    windows = text[starts + torch.arange(LENGTH + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def save(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Saves the weights and the optimizer's state of all processes in a new folder."""
    weights, moments = get_state_dict(model, optimizer, options=BY_NAME)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Loads what processes in any number have saved; each reads what its own stage needs."""
    weights, moments = get_state_dict(model, optimizer, options=BY_NAME)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    found = {"model_state_dict": weights, "optim_state_dict": moments}
    set_state_dict(model, optimizer, **found, options=BY_NAME)


def last_step(checkpoints: Path) -> int:
    """Returns the step of the last complete checkpoint; 0 if there is none.

    ``.metadata`` is written last, so a save that was interrupted lacks it.
    """
    return max((int(path.parent.name) for path in checkpoints.glob("*/.metadata")), default=0)


def main() -> None:
    """Trains in one of the processes that torchrun has started."""
    parser = argparse.ArgumentParser(description="Trains a small GPT.")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--every", type=int, default=50, help="steps between checkpoints (default: %(default)s)"
    )
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("build/gpt_distributed"), help="their folder"
    )
    args = parser.parse_args()

    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    torch.manual_seed(0)  # the same weights in all processes, which keep those of their stages
    layers = nn.Sequential(Embed(), *(Block() for _ in range(4)), Head())
    model = GPipe(layers, chunks=16, schedule="1f1b", mesh=mesh)
    optimizer = AdamW([p for p in model.parameters() if not p.is_meta], lr=3e-3)
    first = last_step(args.checkpoints)
    if first:
        load(model, optimizer, args.checkpoints / str(first))
    text = torch.frombuffer(bytearray(inspect.getsource(argparse), "utf-8"), dtype=torch.uint8)
    for step in range(first + 1, args.steps + 1):
        torch.manual_seed(step)  # batch and dropout follow from the number of the step, after a restart, too
        tokens, targets = batch(text)
        optimizer.zero_grad()
        loss = model.step(tokens, target=targets, loss_fn=F.cross_entropy, optimizer=optimizer)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
        if step % args.every == 0 or step == args.steps:
            save(model, optimizer, args.checkpoints / str(step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Training that is saved by any number of processes, and goes on from there in any other number."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from gpipe_fast import GPipe, keyed_rng
from tests.distributed.cases import TIMEOUT, tied
from tests.distributed.model_cases import LENGTH, numbers, small_gpt
from tests.models import features, tokens

CHUNKS, STEPS = 4, 3


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
    return nn.Sequential(*first, nn.Linear(8, 8), nn.GELU(), nn.BatchNorm1d(8), nn.Linear(8, 4))


def ids(batch: int) -> Tensor:
    return numbers(batch, LENGTH)


def with_ties() -> nn.Sequential:
    *first, decoder = tied()
    return nn.Sequential(*first, nn.Linear(11, 11), decoder)


# By name: model, batch, balances by number of stages. Each stage has parameters, as its optimizer needs some.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], dict[int, list[int]]]] = {
    "norms": (normed, features, {1: [7], 2: [4, 3], 3: [2, 2, 3], 4: [1, 2, 2, 2]}),
    "ties": (with_ties, tokens, {1: [6], 2: [3, 3], 3: [1, 2, 3], 4: [1, 2, 2, 1]}),
    "from_model": (small_gpt, ids, {1: [4], 2: [2, 2], 3: [1, 2, 1], 4: [1, 1, 1, 1]}),
}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Run:
    """A model and its optimizer in training."""

    def __init__(self, name: str, kind: str, seed: int, folder: Path) -> None:
        """Makes the model ``name`` with weights of a seed.

        Its ``kind`` is 'mesh', 'plain', or 'on meta': a mesh that gets memory only when it loads the weights
        in the folder.
        """
        warnings.simplefilter("ignore")
        make, batch, balances = MODELS[name]
        with torch.device("meta" if kind == "on meta" else "cpu"):
            layers = make()
        torch.manual_seed(seed)
        with torch.no_grad():
            for tensor in (*layers.parameters(), *layers.buffers()):
                tensor.copy_(torch.rand(tensor.shape))
        size = dist.get_world_size()
        self.x = batch(8)
        self.model: Any = layers
        if kind in ("mesh", "on meta"):
            self.model = self._pipeline(balances[size], mesh=dist.group.WORLD, timeout=TIMEOUT)
        if kind == "on meta":
            state = {"model": get_model_state_dict(self.model)}
            dcp.load(state, checkpoint_id=folder)
            set_model_state_dict(self.model, state["model"])
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if not p.is_meta], lr=0.01)
        self.is_last = kind == "plain" or dist.get_rank() == size - 1

    def _pipeline(self, balance: list[int], **options: Any) -> Any:
        if isinstance(self.model, nn.Sequential):
            return GPipe(self.model, balance, chunks=CHUNKS, **options)
        return GPipe.from_model(self.model, (self.x,), balance=balance, chunks=CHUNKS, **options)

    def train(self) -> list[list[Any]]:
        """Trains for some steps; returns the outputs of each, where they are."""
        outputs = []
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            output = self._forward()
            (output.float().square().mean() if self.is_last else output).backward()
            self.optimizer.step()
            outputs.append(output.tolist() if self.is_last else [])
        return outputs

    def _forward(self) -> Tensor:
        if not isinstance(self.model, nn.Sequential) or isinstance(self.model, GPipe):
            output: Any = self.model(self.x)
            return output["logits"] if isinstance(output, dict) else output
        with keyed_rng(self.model):
            return torch.cat([self.model(part) for part in self.x.chunk(CHUNKS)])

    def state(self) -> dict[str, Any]:
        """Returns what is saved."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=FLAT)
        return {"model": model, "optimizer": optimizer, "random": torch.get_rng_state()}

    def load(self, folder: Path) -> None:
        """Loads what any other run has saved."""
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        found = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **found, options=FLAT)
        torch.set_rng_state(state["random"])


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state in values that do not change."""
    return {
        f"{part} {name}": value.tolist() if isinstance(value, Tensor) else value
        for part in ("model", "optimizer")
        for name, value in state[part].items()
    } | {"random": state["random"].tolist()}


def saved(name: str, kind: str, folder: Path) -> list[Any]:
    """Trains, saves and goes on: returns the state that was saved, that of the end, and the outputs."""
    run = Run(name, kind, seed=1, folder=folder)
    run.train()
    state = run.state()
    at_save = copied(state)
    dcp.save(state, checkpoint_id=folder)
    outputs = run.train()
    return [at_save, copied(run.state()), outputs]


def loaded(name: str, kind: str, folder: Path) -> list[Any]:
    """Loads and goes on: returns the state that was loaded, that of the end, and the outputs."""
    run = Run(name, kind, seed=2, folder=folder)
    run.load(folder)
    at_load = copied(run.state())
    outputs = run.train()
    return [at_load, copied(run.state()), outputs]

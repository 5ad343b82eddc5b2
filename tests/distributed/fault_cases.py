"""Training that is killed or stopped at a moment that is counted, not timed; and that goes on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint import FileSystemWriter, filesystem

from examples.gpt_distributed import last_step, load, save
from gpipe_fast import GPipe
from gpipe_fast.container import runner_of
from gpipe_fast.distributed.timed_store import TimedStore
from tests.distributed.checkpoint_cases import normed
from tests.models import features

STEPS, EVERY, CHUNKS = 6, 2, 4
BALANCES = {2: [4, 3], 3: [2, 2, 3]}
WRITES = {"write": (filesystem, "_write_item"), "finish": (FileSystemWriter, "finish")}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Fault(NamedTuple):
    """What happens to one rank.

    Attributes:
        rank: the rank.
        how: 'kill' or 'stop'.
        step: the step, from 1.
        place: an action such as '0F1'; or 'store', 'write' or 'finish'.
        count: the operator of the action, the call of the store, or the write, at which it happens, from 0.
    """

    rank: int
    how: str
    step: int
    place: str
    count: int

    @classmethod
    def of_seed(cls, seed: int, size: int) -> Fault:
        """Returns a random fault of one of ``size`` ranks."""
        draw = random.Random(seed)
        rank, step = draw.randrange(size), draw.randint(1, STEPS)
        how = draw.choice([*SIGNALS])
        place = draw.choice(["action"] * 4 + ["store"] * 3 + ["write", "finish"])
        if place == "action":
            kinds = ["F", "R"] + (["B"] if rank == 0 else ["I", "W", "SEND_B", "RECV_F"])
            kinds += ["SEND_F", "RECV_B"] if rank < size - 1 else []
            kind = draw.choice(kinds)
            place = f"{rank}{kind}{draw.randrange(CHUNKS - (kind == 'R'))}"  # the last is not recomputed
        if place in WRITES:
            step = EVERY * draw.randint(1, STEPS // EVERY)
        if place == "finish":
            rank = 0  # it alone writes what makes a checkpoint complete
        return cls(rank, how, step, place, draw.randrange(4))


@contextlib.contextmanager
def happening(fault: Fault, model: GPipe) -> Iterator[None]:
    """Lets a fault happen in the block, which is the step of the fault."""
    left = fault.count

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), SIGNALS[fault.how])
            left -= 1
            return function(*args, **kwargs)

        return counted

    def call(store: TimedStore, method: Callable[..., Any], *args: Any) -> Any:
        # How often a rank polls depends on its speed.
        return (plain if method.__name__ == "check" else counted_call)(store, method, *args)

    plain = TimedStore.call
    counted_call = before(plain)
    if fault.place == "store":
        with mock.patch.object(TimedStore, "call", call):
            yield
    elif fault.place in WRITES:
        owner, name = WRITES[fault.place]
        left = left if fault.place == "write" else 0
        with mock.patch.object(owner, name, before(getattr(owner, name))):
            yield
    else:
        runner_of(model).pipeline.inject_faults(faults=[(fault.place, fault.count, SIGNALS[fault.how].name)])
        yield
        runner_of(model).pipeline.inject_faults()


def train(folder: Path, fault: Fault | None = None, timeout: float = 20.0) -> tuple[dict[int, float], str]:
    """Trains from the last checkpoint on; returns the losses by step, and the error that ended it."""
    warnings.simplefilter("ignore")
    layers = normed()
    model = GPipe(
        layers, BALANCES[dist.get_world_size()], chunks=CHUNKS, mesh=dist.group.WORLD, timeout=timeout
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if not p.is_meta], lr=0.01)
    losses: dict[int, float] = {}
    try:
        first = last_step(folder)
        if first:
            load(model, optimizer, folder / str(first))
        for step in range(first + 1, STEPS + 1):
            is_now = fault is not None and (fault.step, fault.rank) == (step, dist.get_rank())
            with happening(fault, model) if fault and is_now else contextlib.nullcontext():
                losses[step] = _train_step(model, optimizer, step, folder)
    except Exception as error:
        return losses, f"{type(error).__name__}: {error}"
    return losses, ""


def _train_step(model: GPipe, optimizer: torch.optim.Optimizer, step: int, folder: Path) -> float:
    torch.manual_seed(step)
    x = features(8) * step
    optimizer.zero_grad()
    loss: torch.Tensor = model.step(x, target=x[:, :4], loss_fn=F.mse_loss, optimizer=optimizer)
    if step % EVERY == 0:
        save(model, optimizer, folder / str(step))
    return loss.item()

"""torchgpipe beside ours, each made alike, so that one test shows what both do or where one fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import gpipe_fast
import gpipe_fast.layers.skip

# A GPU machine may lack it; only the tests that compare with it are skipped there.
torchgpipe = pytest.importorskip("torchgpipe")
torchgpipe_skip = pytest.importorskip("torchgpipe.skip")


class Library(NamedTuple):
    """One of the two.

    Attributes:
        package: what users import.
        skip: its part of skip connections.
    """

    package: Any
    skip: Any

    def make(self, module: nn.Module, balance: Iterable[int] | None = None, **options: Any) -> Any:
        """A pipeline, by default of as many CPU stages as are asked for."""
        return self.package.GPipe(module, balance, **{"devices": ["cpu"] * 8, **options})

    @contextlib.contextmanager
    def fails(self, *errors: type[BaseException]) -> Iterator[None]:
        """A block that our library passes, and that torchgpipe does not: it raises one of these."""
        if self is OURS:
            yield
            return
        with pytest.raises(errors):
            yield


OURS = Library(gpipe_fast, gpipe_fast.skip)
TORCHGPIPE = Library(torchgpipe, torchgpipe_skip)
both = pytest.mark.parametrize("library", [OURS, TORCHGPIPE], ids=["gpipe_fast", "torchgpipe"])
# What tests watch with layers in Python is not remarked on.
in_python = pytest.mark.filterwarnings("ignore:.* runs in Python")


class Of(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class Noting(nn.Module):
    """A linear layer that keeps the first column, notes what it is called for, and can be told to fail.

    Attributes:
        seen: of each call whether it was a forward, "F", "C" where it is recomputed later, or that recompute,
            "R"; how many samples; and the first number.
        fails: raises the error that this returns for such a note.
    """

    def __init__(self, library: Library, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.library = library
        self.seen: list[tuple[str, int, float]] = []
        self.fails: Callable[[str, float], BaseException | None] = lambda phase, first: None

    def forward(self, x: Tensor) -> Tensor:
        package = self.library.package
        phase = "R" if package.is_recomputing() else "C" if package.is_checkpointing() else "F"
        first = float(x.detach()[0, 0]) if len(x) else 0.0
        self.seen.append((phase, len(x), first))
        error = self.fails(phase, first)
        if error is not None:
            raise error
        return torch.cat([x[:, :1], self.linear(x)[:, 1:]], 1)

    @property
    def phases(self) -> str:
        """Of all calls."""
        return "".join(phase for phase, _, _ in self.seen)

    @property
    def sizes(self) -> list[int]:
        """Samples of the forwards."""
        return [size for phase, size, _ in self.seen if phase != "R"]


def numbered(batch: int = 8, width: int = 6) -> Tensor:
    """Samples that begin with their numbers."""
    x = torch.randn(batch, width, generator=torch.Generator().manual_seed(1))
    if batch:
        x[:, 0] = torch.arange(batch)
    return x


def gradients(model: nn.Module) -> list[Tensor | None]:
    """Of all parameters."""
    return [p.grad for p in model.parameters()]

"""gpipe_fast and torchgpipe behind one interface, so that a test runs on both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import gpipe_fast
import gpipe_fast.skip

# A GPU machine may lack torchgpipe; only the tests that compare with it are skipped there.
torchgpipe = pytest.importorskip("torchgpipe")
torchgpipe_skip = pytest.importorskip("torchgpipe.skip")


class Library(NamedTuple):
    """One of the two libraries.

    Attributes:
        package: the package that users import.
        skip: its module of skip connections.
    """

    package: Any
    skip: Any

    def make(self, module: nn.Module, balance: Iterable[int] | None = None, **options: Any) -> Any:
        """Returns a pipeline; by default all stages are on the CPU."""
        return self.package.GPipe(module, balance, **{"devices": ["cpu"] * 8, **options})


OURS = Library(gpipe_fast, gpipe_fast.skip)
TORCHGPIPE = Library(torchgpipe, torchgpipe_skip)
both_libraries = pytest.mark.parametrize("library", [OURS, TORCHGPIPE], ids=["gpipe_fast", "torchgpipe"])
# Layers that record their calls run in Python, which gpipe_fast warns about.
ignore_python_warning = pytest.mark.filterwarnings("ignore:.* runs in Python")


class FunctionLayer(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class RecordingLinear(nn.Module):
    """A linear layer that passes the first column through, and records its calls.

    Attributes:
        calls: for each call its phase ("F": a forward that is not recomputed, "C": a forward that is
            recomputed later, "R": a recompute), the number of samples, and the first sample's first number.
    """

    def __init__(self, library: Library, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.library = library
        self.calls: list[tuple[str, int, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        package = self.library.package
        phase = "R" if package.is_recomputing() else "C" if package.is_checkpointing() else "F"
        first = float(x.detach()[0, 0]) if len(x) else 0.0
        self.calls.append((phase, len(x), first))
        return torch.cat([x[:, :1], self.linear(x)[:, 1:]], 1)

    @property
    def phases(self) -> str:
        """The phases of all calls, in order."""
        return "".join(phase for phase, _, _ in self.calls)

    @property
    def sizes(self) -> list[int]:
        """The micro-batch sizes of the forwards."""
        return [size for phase, size, _ in self.calls if phase != "R"]


def numbered_samples(batch: int = 8, width: int = 6) -> Tensor:
    """Returns a mini-batch in which the first number of each sample is its index."""
    x = torch.randn(batch, width, generator=torch.Generator().manual_seed(1))
    if batch:
        x[:, 0] = torch.arange(batch)
    return x

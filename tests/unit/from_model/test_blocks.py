"""Blocks are found: lists of modules that are called in order, or the modules that a model calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe


class TwoLists(nn.Module):
    """An encoder and a decoder; the blocks of the decoder contain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.decoder = nn.ModuleList(Inner() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.encoder, *self.decoder):
            x = block(x)
        return x


class Inner(nn.Module):
    """A block with a list."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[1](self.parts[0](x))


class Shared(nn.Module):
    """One layer that is called three times, as of ALBERT, in a module that has most parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.layer = nn.Linear(4, 4)
        self.body.forward = lambda x: self.body.layer(self.body.layer(self.body.layer(x)))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


SEQUENTIAL = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("make", "stages", "names"),
    [
        (TwoLists, 2, ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]),
        # More stages than blocks: the lists in the blocks instead.
        (TwoLists, 5, ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]),
        (Shared, 2, ["body.layer", "body.layer", "body.layer", "head"]),
        (lambda: SEQUENTIAL, 2, ["0", "1", "2"]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_blocks_of_a_model(make: Callable[[], nn.Module], stages: int, names: list[str]) -> None:
    plain = make()
    model = GPipe.from_model(plain, (torch.randn(4, 4),), devices=["cpu"] * stages, chunks=2)
    known = {module: name for name, module in plain.named_modules()}
    assert [known[block] for block in model._calls.blocks] == names
    x = torch.randn(6, 4)
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("blocks", ["decoder", [nn.Linear], Inner, ["encoder", "decoder.0"]])
def test_named_blocks(blocks: object) -> None:
    plain = TwoLists()
    model = GPipe.from_model(
        plain, (torch.randn(4, 4),), blocks=blocks, balance=[1, 1] if blocks in ("decoder", Inner) else None
    )
    number = {"decoder": 2, Inner: 2}.get(blocks if isinstance(blocks, (str, type)) else "")
    assert number is None or len(model._calls.blocks) == number
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), plain(x))


def test_a_small_sequence_beside_lists_is_no_block() -> None:
    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = nn.Sequential(nn.Linear(1, 2), nn.SiLU(), nn.Linear(2, 4))
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.single = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            x = x + self.time(time)
            for block in [*self.blocks, *self.single]:
                x = block(x)
            return x

    model = Timed()
    inputs = torch.ones(6, 4), torch.ones(6, 1)
    pipe = GPipe.from_model(model, inputs, devices=["cpu"] * 2, balance=[3, 2], chunks=3)
    assert torch.equal(pipe(*inputs), model(*inputs))

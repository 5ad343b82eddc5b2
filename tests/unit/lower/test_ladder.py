"""Ladders of stages: nested rungs, the limit on bytes, and what the backward then recomputes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, fx, nn

from bench.models.gpt import blocks
from gpipe_fast.lower.alias import source_of
from gpipe_fast.lower.ladder import Ladder, Rung, bytes_of, is_backward
from gpipe_fast.lower.operator_times import nanoseconds
from gpipe_fast.lower.split import JOINT_POSITION, split
from gpipe_fast.trace.joint_graph import JointGraph
from tests.stages import trace_joint

SHARES = [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0]


@pytest.fixture(autouse=True)
def estimated_times() -> Iterator[None]:
    """Estimates times, so that ladders are the same in every run."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.second(torch.relu(self.norm(self.first(x))))
        return found.relu()


class TwoScales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)
        self.inner = Residual(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, torch.tanh(self.up(self.inner(self.down(x).relu())))], 1)


def gpt() -> JointGraph:
    layers = [*blocks(2, 16, 2), nn.Dropout(0.1), *blocks(1, 16, 2)]
    return trace_joint(layers, torch.randn(2, 8, 16, requires_grad=True))


def resnet() -> JointGraph:
    layers = [nn.Conv2d(3, 4, 3), Residual(4), Residual(4), nn.Flatten(), nn.Linear(64, 3)]
    return trace_joint(layers, torch.randn(2, 3, 6, 6))


def unet() -> JointGraph:
    return trace_joint([nn.Conv2d(3, 4, 1), TwoScales(), nn.Conv2d(8, 2, 1)], torch.randn(2, 3, 8, 8))


every_model = pytest.mark.parametrize("make", [gpt, resnet, unet])


def kept(joint: JointGraph, share: float) -> int:
    return sum(tensor.bytes for tensor in split(joint, share).saved)


def recomputed(joint: JointGraph, share: float) -> int:
    """Returns the time of the forward operators in the backward's graph, besides views."""
    backward = split(joint, share).backward
    assert backward is not None
    nodes = list(joint.module.graph.nodes)
    found: set[fx.Node] = set()
    for copy in backward.module.graph.nodes:
        node = nodes[copy.meta[JOINT_POSITION]] if copy.op == "call_function" else copy
        if node.op != "call_function" or is_backward(node) or source_of(node).base is not node:
            continue
        if isinstance(node.meta["val"], Tensor):
            found.add(node.args[0] if "getitem" in node.name else node)
    return sum(map(nanoseconds, found))


def rung_of(joint: JointGraph, share: float) -> Rung:
    ladder = Ladder.of(joint)
    values = {n.name: n.meta.get("val") for n in joint.module.graph.nodes}
    index, _ = ladder.furthest(lambda name: bytes_of(values[name]), share)
    return ladder.rungs[index]


@pytest.mark.smoke
@every_model
def test_no_share_keeps_more_than_it_says_and_more_never_recomputes_more(
    make: Callable[[], JointGraph],
) -> None:
    joint = make()
    whole = kept(joint, 1.0)
    shares = [i / 20 for i in range(21)]
    bytes_kept = [kept(joint, share) for share in shares]
    assert all(size <= share * whole for size, share in zip(bytes_kept, shares, strict=True))
    assert bytes_kept == sorted(bytes_kept)
    assert len(set(bytes_kept)) >= 8
    times = [recomputed(joint, share) for share in shares]
    assert times == sorted(times, reverse=True)


@every_model
def test_a_rung_knows_what_the_backward_recomputes(make: Callable[[], JointGraph]) -> None:
    joint = make()
    for share in SHARES:
        assert rung_of(joint, share).recompute == recomputed(joint, share)


@every_model
def test_rungs_lead_from_nothing_to_all_that_the_backward_reads(make: Callable[[], JointGraph]) -> None:
    joint = make()
    first, *others = Ladder.of(joint).rungs
    assert (first.added, first.dropped) == ((), ())
    saved: set[str] = set()
    for rung in others:
        assert not saved & {*rung.added}
        saved = (saved | {*rung.added}) - {*rung.dropped}
    assert saved == {tensor.name for tensor in split(joint, 1.0).saved}
    assert others[-1].recompute == 0


def test_half_of_the_bytes_of_gpt_blocks_cost_little_recompute() -> None:
    joint = trace_joint([*blocks(6, 256, 8)], torch.empty(2, 128, 256, requires_grad=True))
    rungs = Ladder.of(joint).rungs
    assert rung_of(joint, 0.5).recompute < 0.3 * rungs[0].recompute
    assert rung_of(joint, 0.7).recompute < 0.1 * rungs[0].recompute
    assert len(rungs) > 6 * 6


def test_equal_layers_are_saved_one_after_another() -> None:
    joint = trace_joint([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)], torch.randn(3, 4))
    sizes = [kept(joint, i / 5) for i in range(6)]
    assert sizes == [0, 48, 96, 144, 192, 240]


def test_a_ladder_is_made_once() -> None:
    joint = gpt()
    assert Ladder.of(joint) is Ladder.of(joint)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_ends_need_no_ladder(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    joint = resnet()
    monkeypatch.setattr(Ladder, "of", None)
    split(joint, share)


def test_torch_checkpoint_inside_a_layer_says_nothing_about_what_is_saved() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=False)
            return found

    x = torch.randn(4, 8, requires_grad=True)
    inside, plain = trace_joint([Inner()], x), trace_joint([Inner().layers], x)
    assert [kept(inside, share) for share in SHARES] == [kept(plain, share) for share in SHARES]
    assert kept(inside, 1.0) == 2 * 4 * 8 * 4

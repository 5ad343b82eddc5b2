"""Pipelines with skip connections equal the plain loop; skips go directly from stage to stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast._extension import kept_bytes
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.skip import Namespace, pop, skippable, stash
from tests.reference import loop_step, pipeline_step, unequal

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*micro-batches on:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*runs in Python:UserWarning"),
]

WIDTH, M = 8, 4
BALANCES = [[8], [2, 6], [3, 3, 2], [2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1, 1]]


class _HasLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


@skippable(stash=["s", "mask", "nothing"])
class StashSeveral(_HasLinear):
    """Stashes its input, a tensor without a gradient, and None."""

    def forward(self, x: Tensor) -> Any:
        yield stash("mask", x > 0)
        yield stash("s", x)
        yield stash("nothing", None)
        return self.linear(x)


@skippable(pop=["nothing", "s", "mask"])
class PopSeveral(_HasLinear):
    def forward(self, x: Tensor) -> Any:
        mask = yield pop("mask")
        assert (yield pop("nothing")) is None
        skip = yield pop("s")
        return torch.where(mask, self.linear(x), skip.tanh()) * skip


def make_model() -> nn.Sequential:
    """Returns a model with two overlapping skip connections of equal names."""
    torch.manual_seed(0)
    first, second = Namespace(), Namespace()
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        StashSeveral().isolate(first),
        nn.Tanh(),
        StashSeveral().isolate(second),
        nn.Dropout(0.25),
        PopSeveral().isolate(first),
        PopSeveral().isolate(second),
        nn.Linear(WIDTH, WIDTH),
    )


def features(batch: int = 8) -> Tensor:
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize("balance", BALANCES, ids=str)
def test_training_with_skips_equals_the_plain_loop(balance: list[int], backend: str) -> None:
    model = make_model()
    pipe = GPipe(model, balance, chunks=M, backend=backend)
    for batch in (7, 3):
        expected = loop_step(model, features(batch), M)
        for mode in CHECKPOINT_MODES:
            pipe.checkpoint = mode
            assert unequal(pipeline_step(pipe, features(batch)), expected) == [], (batch, mode)


@skippable(stash=["s"])
class StashDependingOnData(_HasLinear):
    """Stashes a tensor or None, depending on the data."""

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        yield stash("s", y * 2 if float(x.detach().sum()) > 0 else None)
        return y


@skippable(pop=["s"])
class AddIfNotNone(_HasLinear):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("s")
        return self.linear(x) if skip is None else self.linear(x) + skip.sigmoid()


@pytest.mark.parametrize("balance", [[5], [1, 2, 2]], ids=str)
def test_a_skip_that_is_none_for_some_micro_batches_equals_the_plain_loop(balance: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), StashDependingOnData(), nn.Tanh(), AddIfNotNone(), nn.Linear(WIDTH, WIDTH)
    )
    expected = loop_step(model, features(), M)
    sums = [float(c.sum()) > 0 for c in model[0](features()).detach().chunk(M)]
    assert len(set(sums)) == 2
    pipe = GPipe(model, balance, chunks=M)
    for mode in (*CHECKPOINT_MODES, "except_last"):
        pipe.checkpoint = mode
        assert unequal(pipeline_step(pipe, features()), expected) == [], mode


@skippable(stash=["deep"])
class StashInput(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("deep", x)
        return x


@skippable(pop=["deep"])
class AddSkip(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("deep"))


@pytest.mark.parametrize("balance", [[3], [1, 2], [1, 1, 1]], ids=str)
def test_modules_nested_in_layers_may_stash_and_pop(balance: list[int]) -> None:
    """A module nested in a layer may stash for a module of the same layer or of another one."""
    torch.manual_seed(0)
    inner = Namespace()
    model = nn.Sequential(
        nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            StashInput(),
            StashInput().isolate(inner),
            nn.Tanh(),
            AddSkip().isolate(inner),
        ),
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.Tanh(), AddSkip()),
    )
    pipe = GPipe(model, balance, chunks=M, backend="aten")
    assert unequal(pipeline_step(pipe, features()), loop_step(model, features(), M)) == []


def test_a_skip_without_a_gradient_equals_the_plain_loop() -> None:
    """The popped tensor may be unused, and the popping stage may need no gradient."""

    @skippable(pop=["deep"])
    class PopUnused(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield pop("deep")
            return x

    for trained in ([0, 2], [2]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), StashInput(), nn.Linear(WIDTH, WIDTH), PopUnused())
        for index in {0, 2} - set(trained):
            model[index].requires_grad_(False)
        for balance in ([4], [1, 1, 1, 1]):
            pipe = GPipe(model, balance, chunks=M, backend="aten")
            ours = pipeline_step(pipe, features(), input_gradient=False)
            assert unequal(ours, loop_step(model, features(), M, input_gradient=False)) == []


def test_the_stages_that_a_skip_bypasses_save_nothing_for_it() -> None:
    """Three stages lie between; they save the same bytes for the backward as without a skip connection."""

    def bytes_saved(layers: list[nn.Module]) -> int:
        pipe = GPipe(nn.Sequential(*layers), [1, 1, 1, 1, 1], chunks=M, checkpoint="always", backend="aten")
        return kept_bytes(pipe(features(64).requires_grad_()))

    torch.manual_seed(0)
    between = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    bytes_without_skip = bytes_saved([nn.Linear(WIDTH, WIDTH), *between, nn.Linear(WIDTH, WIDTH)])
    # The popping stage saves the skip tensor, which is as large as a boundary activation.
    bytes_with_skip = bytes_saved([StashInput(), *between, AddSkip()])
    activation = 64 * WIDTH * 4
    # StashInput saves no input, and AddSkip needs none in its backward; each stage between saves its input.
    assert bytes_without_skip == 5 * activation
    assert bytes_with_skip <= 4 * activation


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("balance", [[4], [1, 3], [1, 1, 2], [2, 2]], ids=str)
def test_an_in_place_change_of_a_stashed_tensor_is_seen_or_rejected(balance: list[int], backend: str) -> None:
    """Within a stage the pop sees the change, as in the plain loop; across stages it is rejected."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), StashInput(), nn.Hardtanh(-0.1, 0.1, inplace=True), AddSkip()
    )
    pipe = GPipe(model, balance, chunks=M, backend=backend)
    if balance in ([4], [1, 3]):
        assert unequal(pipeline_step(pipe, features()), loop_step(model, features(), M)) == []
    else:
        with pytest.raises(RuntimeError, match=r"change an input of shape .* in place.* is also stashed"):
            pipe(features())


@skippable(stash=["broken"])
class ForgetsToStash(_HasLinear):
    """Omits its declared stash for some inputs."""

    def forward(self, x: Tensor) -> Any:
        if float(x.detach().sum()) < 0:
            yield stash("broken", x)
        return self.linear(x)


@skippable(pop=["broken"])
class PopForgotten(_HasLinear):
    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + (yield pop("broken"))


@pytest.mark.parametrize("balance", [[3], [1, 1, 1]], ids=str)
def test_a_missing_stash_fails_one_call_and_leaves_the_pipeline_usable(balance: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(ForgetsToStash(), nn.Tanh(), PopForgotten())
    pipe = GPipe(model, balance, chunks=2)
    good, bad = -features().abs(), features().abs()
    for _ in range(2):
        assert unequal(pipeline_step(pipe, good), loop_step(model, good, 2)) == []
        with pytest.raises(RuntimeError, match="'broken' must be stashed but have not"):
            pipe(torch.cat([good, bad]))

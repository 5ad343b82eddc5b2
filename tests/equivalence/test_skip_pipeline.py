"""Skip connections through pipelines: every number as the plain loop's, straight from stage to stage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast._extension import kept_bytes
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.layers.skip import Namespace, pop, skippable, stash
from tests.inside import compiler_of
from tests.reference import loop_step, pipeline_step, restored, unequal
from tests.untraceable import Of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*micro-batches on:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*runs in Python:UserWarning"),
]

WIDTH, M = 8, 4
BALANCES = [[8], [2, 6], [3, 3, 2], [2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1, 1]]


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


@skippable(stash=["s", "mask", "nothing"])
class Down(_Linear):
    """Stashes what comes in, a tensor without a gradient, and None."""

    def forward(self, x: Tensor) -> Any:
        yield stash("mask", x > 0)
        yield stash("s", x)
        yield stash("nothing", None)
        return self.linear(x)


@skippable(pop=["nothing", "s", "mask"])
class Up(_Linear):
    def forward(self, x: Tensor) -> Any:
        mask = yield pop("mask")
        assert (yield pop("nothing")) is None
        skip = yield pop("s")
        return torch.where(mask, self.linear(x), skip.tanh()) * skip


def crossed() -> nn.Sequential:
    """Two skip connections that overlap, of equal names."""
    torch.manual_seed(0)
    first, second = Namespace(), Namespace()
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        Down().isolate(first),
        nn.Tanh(),
        Down().isolate(second),
        nn.Dropout(0.25),
        Up().isolate(first),
        Up().isolate(second),
        nn.Linear(WIDTH, WIDTH),
    )


def features(batch: int = 8) -> Tensor:
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize("balance", BALANCES, ids=str)
def test_all_numbers_are_the_plain_loop_s(balance: list[int], backend: str) -> None:
    model = crossed()
    pipe = GPipe(model, balance, chunks=M, backend=backend)
    for batch in (8, 7, 3):
        expected = loop_step(model, features(batch), M)
        for mode in CHECKPOINT_MODES:
            pipe.checkpoint = mode
            assert unequal(pipeline_step(pipe, features(batch)), expected) == [], (batch, mode)


@pytest.mark.parametrize("balance", BALANCES, ids=str)
def test_inference(balance: list[int]) -> None:
    model = crossed().eval()
    pipe = GPipe(model, balance, chunks=M, backend="aten")
    with torch.no_grad():
        assert torch.equal(pipe(features()), torch.cat([model(c) for c in features().chunk(M)]))


def counting(f: nn.Module, x: Tensor) -> Any:
    y = f(x)
    return y if float(y.detach().sum()) < 1e9 else -y


@pytest.mark.parametrize("balance", [[8], [3, 3, 2], [1] * 8], ids=str)
@pytest.mark.parametrize("where", [0, 2, 4, 7])
def test_across_layers_in_python(where: int, balance: list[int]) -> None:
    """What is stashed passes runs of lowered layers and layers in Python alike."""
    model = crossed()
    model[where] = Of(counting, nn.Linear(WIDTH, WIDTH))
    expected = loop_step(model, features(), M)
    pipe = GPipe(model, balance, chunks=M)
    for mode in (*CHECKPOINT_MODES, "always"):
        pipe.checkpoint = mode
        assert unequal(pipeline_step(pipe, features()), expected) == [], mode


@skippable(stash=["s"])
class Untraceable(_Linear):
    """Stashes something else by what comes in, or None."""

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        yield stash("s", y * 2 if float(x.detach().sum()) > 0 else None)
        return y


@skippable(pop=["s"])
class Added(_Linear):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("s")
        return self.linear(x) if skip is None else self.linear(x) + skip.sigmoid()


@pytest.mark.parametrize("balance", [[5], [2, 3], [1, 2, 2], [1] * 5], ids=str)
def test_none_for_some_micro_batches_only(balance: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Untraceable(), nn.Tanh(), Added(), nn.Linear(WIDTH, WIDTH))
    expected = loop_step(model, features(), M)
    sums = [float(c.sum()) > 0 for c in model[0](features()).detach().chunk(M)]
    assert len(set(sums)) == 2
    pipe = GPipe(model, balance, chunks=M)
    for mode in (*CHECKPOINT_MODES, "except_last"):
        pipe.checkpoint = mode
        assert unequal(pipeline_step(pipe, features()), expected) == [], mode


@skippable(stash=["deep"])
class Deep(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("deep", x)
        return x


@skippable(pop=["deep"])
class Back(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("deep"))


@pytest.mark.parametrize("balance", [[3], [1, 2], [1, 1, 1]], ids=str)
def test_within_layers_and_out_of_them(balance: list[int]) -> None:
    """Modules deep in a layer may stash: for others in it, and for other layers."""
    torch.manual_seed(0)
    inner = Namespace()
    model = nn.Sequential(
        nn.Sequential(
            nn.Linear(WIDTH, WIDTH), Deep(), Deep().isolate(inner), nn.Tanh(), Back().isolate(inner)
        ),
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.Tanh(), Back()),
    )
    pipe = GPipe(model, balance, chunks=M, backend="aten")
    assert unequal(pipeline_step(pipe, features()), loop_step(model, features(), M)) == []


def test_a_skip_whose_gradient_never_comes() -> None:
    """What is popped may not be used, and its stage may need no gradient at all."""

    @skippable(pop=["deep"])
    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield pop("deep")
            return x

    for trained in ([0, 2], [2]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Deep(), nn.Linear(WIDTH, WIDTH), Dropped())
        for index in {0, 2} - set(trained):
            model[index].requires_grad_(False)
        for balance in ([4], [2, 2], [1, 1, 1, 1]):
            pipe = GPipe(model, balance, chunks=M, backend="aten")
            ours = pipeline_step(pipe, features(), input_gradient=False)
            assert unequal(ours, loop_step(model, features(), M, input_gradient=False)) == []


def test_the_stages_between_hold_nothing_of_it() -> None:
    """Three stages between; what they keep for the backward is what they keep without a skip connection."""

    def kept(layers: list[nn.Module]) -> int:
        pipe = GPipe(nn.Sequential(*layers), [1, 1, 1, 1, 1], chunks=M, checkpoint="always", backend="aten")
        return kept_bytes(pipe(features(64).requires_grad_()))

    torch.manual_seed(0)
    between = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    without = kept([nn.Linear(WIDTH, WIDTH), *between, nn.Linear(WIDTH, WIDTH)])
    # The one that pops it keeps it, once more as wide as any boundary activation.
    with_skip = kept([Deep(), *between, Back()])
    activation = 64 * WIDTH * 4
    # Deep keeps no input and Back reads none in its backward; between, each keeps its input.
    assert without == 5 * activation
    assert with_skip <= 4 * activation


def test_it_crosses_no_stage_between() -> None:
    """Layers between are called with what the one before returns, and nothing else."""
    seen: list[Any] = []

    def look(f: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return f(*args)

    torch.manual_seed(0)
    model = nn.Sequential(Deep(), *(Of(look, nn.Linear(WIDTH, WIDTH)) for _ in range(3)), Back())
    pipe = GPipe(model, [1] * 5, chunks=M, backend="eager")
    pipe(features())
    assert len(seen) == 3 * M
    assert all(len(args) == 1 and isinstance(args[0], Tensor) and not kwargs for args, kwargs in seen)


def test_retained_graphs_and_new_shapes() -> None:
    model = crossed().eval()
    pipe = GPipe(model, [2, 2, 2, 2], chunks=M, checkpoint="always", backend="aten")
    for batch in (8, 12, 20, 28, 8):
        x = features(batch)
        with restored(model):
            torch.cat([model(c) for c in x.chunk(M)]).sum().backward()
            expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        y = pipe(x)
        y.sum().backward(retain_graph=True)
        pipe.zero_grad()
        y.sum().backward()
        found = [p.grad for p in pipe.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        pipe.zero_grad()


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("balance", [[4], [1, 3], [1, 1, 2], [2, 2]], ids=str)
def test_in_place_changes_of_what_is_stashed(balance: list[int], backend: str) -> None:
    """Within a stage the pop sees them, as in the plain loop; across stages they are refused, not missed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Deep(), nn.Hardtanh(-0.1, 0.1, inplace=True), Back())
    pipe = GPipe(model, balance, chunks=M, backend=backend)
    if balance in ([4], [1, 3]):
        assert unequal(pipeline_step(pipe, features()), loop_step(model, features(), M)) == []
    else:
        with pytest.raises(RuntimeError, match=r"change an input of shape .* in place.* is also stashed"):
            pipe(features())


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (lambda: [Deep(), nn.Tanh()], "no module declared 'deep' as poppable but stashed"),
        (lambda: [Back(), Deep()], "'0' declared 'deep' as poppable but it was not stashed"),
    ],
)
def test_what_does_not_match_is_refused(layers: Callable[[], list[nn.Module]], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        GPipe(nn.Sequential(*layers()), [2])


@skippable(stash=["broken"])
class Broken(_Linear):
    """Breaks its promise, for some inputs."""

    def forward(self, x: Tensor) -> Any:
        if float(x.detach().sum()) < 0:
            yield stash("broken", x)
        return self.linear(x)


@skippable(pop=["broken"])
class Mended(_Linear):
    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + (yield pop("broken"))


@pytest.mark.parametrize("balance", [[3], [1, 1, 1]], ids=str)
def test_a_broken_promise_ends_the_call_alone(balance: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Broken(), nn.Tanh(), Mended())
    pipe = GPipe(model, balance, chunks=2)
    good, bad = -features().abs(), features().abs()
    for _ in range(2):
        assert unequal(pipeline_step(pipe, good), loop_step(model, good, 2)) == []
        with pytest.raises(RuntimeError, match="'broken' must be stashed but have not"):
            pipe(torch.cat([good, bad]))


def test_copies_are_pipelines_of_their_own() -> None:
    model = crossed()
    pipe = GPipe(model, [2, 2, 2, 2], chunks=M, backend="aten")
    expected = pipeline_step(pipe, features())
    assert unequal(pipeline_step(copy.deepcopy(pipe), features()), expected) == []


def test_equal_stages_share_one_trace() -> None:
    """Namespaces that differ only by themselves make no other program."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        own = Namespace()
        layers += [Deep().isolate(own), nn.Linear(WIDTH, WIDTH), Back().isolate(own)]
    pipe = GPipe(nn.Sequential(*layers), [3, 3, 3], chunks=M, backend="aten")
    with torch.no_grad():
        pipe(features())
    assert compiler_of(pipe).num_traces == 1

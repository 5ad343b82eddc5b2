"""Layers that keep a table and make a longer one when they need it, as home-made GPTs do with masks."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.container import runner_of
from gpipe_fast.runtime.planner import Call, PlannedCall
from gpipe_fast.streaming import CallStream
from tests.reference import collect, gradient_like, unequal
from tests.untraceable import WIDTH, without_warnings

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (3, 5, 4, 7, 7, 2, 9)
CHUNKS = 2


def table(length: int) -> Tensor:
    return torch.ones(length, length).tril() / length


class Cached(nn.Module):
    """Mixes positions by a table, which a subclass keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mixed: Tensor = self.table(length)[:length, :length] @ self.linear(x).relu()
        return x + mixed

    def table(self, length: int) -> Tensor:
        raise NotImplementedError


class Attribute(Cached):
    kept: Tensor | None = None

    def table(self, length: int) -> Tensor:
        if self.kept is None or len(self.kept) < length:
            self.kept = table(length)
        return self.kept


class Buffer(Cached):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", table(4), persistent=False)

    def table(self, length: int) -> Tensor:
        if len(self.kept) < length:
            self.kept = table(length)
        return self.kept


class LateBuffer(Cached):
    def table(self, length: int) -> Tensor:
        if not hasattr(self, "kept") or len(self.kept) < length:
            self.register_buffer("kept", table(length), persistent=False)
        return self.kept


class Dictionary(Cached):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tensor] = {}

    def table(self, length: int) -> Tensor:
        if length not in self.kept:
            self.kept[length] = table(length)
        return self.kept[length]


class Shrinking(Cached):
    """Keeps a table for the latest length only."""

    kept = torch.ones(0)

    def table(self, length: int) -> Tensor:
        if len(self.kept) != length:
            self.kept = table(length)
        return self.kept


class Replaced(Cached):
    """Keeps a table of the greatest length only, always of one size."""

    longest = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(max(LENGTHS), max(LENGTHS)))

    def table(self, length: int) -> Tensor:
        if length > self.longest:
            self.longest, self.kept = length, torch.full((max(LENGTHS), max(LENGTHS)), float(length))
        return self.kept


class Tables:
    """A cache that layers share."""

    def __init__(self) -> None:
        self.longest = torch.ones(0)

    def of(self, length: int) -> Tensor:
        if len(self.longest) < length:
            self.longest = table(length)
        return self.longest


class Shared(Cached):
    def __init__(self, tables: Tables) -> None:
        super().__init__()
        self.tables = tables

    def table(self, length: int) -> Tensor:
        return self.tables.of(length)


class SharedModule(Cached):
    def __init__(self, owner: Cached) -> None:
        super().__init__()
        self.owner = owner

    def table(self, length: int) -> Tensor:
        return self.owner.table(length)


def shared() -> list[Cached]:
    tables = Tables()
    return [Shared(tables) for _ in range(3)]


def shared_module() -> list[Cached]:
    owner = Attribute()
    return [SharedModule(owner) for _ in range(3)]


def each(kind: Callable[[], Cached]) -> Callable[[], list[Cached]]:
    return lambda: [kind() for _ in range(3)]


KINDS: dict[str, Callable[[], list[Cached]]] = {
    **{
        kind.__name__: each(kind)
        for kind in (
            Attribute,
            Buffer,
            LateBuffer,
            Dictionary,
            Shrinking,
            Replaced,
        )
    },
    "mixed": lambda: [Attribute(), Dictionary(), Buffer()],
    "shared": shared,
    "shared module": shared_module,
}


def model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    first, second, third = KINDS[kind]()
    return nn.Sequential(first, nn.LayerNorm(WIDTH), second, nn.Linear(WIDTH, WIDTH), third)


def loop(plain: nn.Sequential, x: Tensor) -> Tensor:
    return torch.cat([plain(c) for c in x.chunk(CHUNKS)])


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def call(pipe: GPipe, plain: nn.Sequential, x: Tensor) -> list[str]:
    results = []
    for run, module in ((pipe, pipe), (functools.partial(loop, plain), plain)):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        output = run(leaf)
        results.append(collect(module, leaf, output, gradient_like(output)))
    return unequal(*results)


def step(pipe: GPipe, plain: nn.Sequential, x: Tensor) -> list[str]:
    pipe.zero_grad()
    plain.zero_grad()
    ours = {"loss": pipe.step(x, target=x, loss_fn=squares, normalizer=1)}
    losses = [squares(plain(c), c) for c in x.chunk(CHUNKS)]
    expected: dict[str, Any] = {"loss": torch.stack(losses).sum().detach()}
    for loss in reversed(losses):
        loss.backward()
    for result, module in ((ours, pipe), (expected, plain)):
        result |= {name: p.grad for name, p in module.named_parameters()}
    return unequal(ours, expected)


def evaluate(pipe: GPipe, plain: nn.Sequential, x: Tensor) -> list[str]:
    with torch.no_grad():
        losses = [squares(plain(c), c) for c in x.chunk(CHUNKS)]
    ours = {"loss": pipe.evaluate(x, target=x, loss_fn=squares, normalizer=1)}
    return unequal(ours, {"loss": torch.stack(losses).sum()})


def stream(pipe: GPipe, plain: nn.Sequential, x: Tensor) -> list[str]:
    with torch.no_grad():
        batches = [x, x * 2]
        ours = dict(enumerate(pipe.stream(batches)))
        return unequal(ours, {i: loop(plain, batch) for i, batch in enumerate(batches)})


WAYS = {way.__name__: way for way in (call, step, evaluate, stream)}


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("way", [*WAYS, "all"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(8)
def test_every_longer_input_gives_the_numbers_of_the_plain_loop(kind: str, way: str, checkpoint: str) -> None:
    plain, layers = model(kind), model(kind)
    pipe = GPipe(layers, [2, 3], devices=["cpu"] * 2, chunks=CHUNKS, checkpoint=checkpoint)
    with without_warnings():
        for index, length in enumerate(LENGTHS):
            run = [*WAYS.values()][index % len(WAYS)] if way == "all" else WAYS[way]
            training = way != "all" or index % 3 != 2
            pipe.train(training), plain.train(training)
            x = torch.randn(4, length, WIDTH, generator=torch.Generator().manual_seed(index))
            assert run(pipe, plain, x) == [], f"length {length}, {run.__name__}"


class Gate(nn.Module):
    """Passes its input on once it may: a layer in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reached, self.is_open = threading.Event(), threading.Event()
        self.is_open.set()

    def forward(self, x: Tensor) -> Tensor:
        self.is_reached.set()
        self.is_open.wait()
        return x


def test_a_layer_that_reads_the_longer_table_later_is_no_error_in_a_stream() -> None:
    tables, gate = Tables(), Gate()
    tables.of(4)
    pipe = GPipe(nn.Sequential(Shared(tables), gate, Shared(tables)), [1, 2], devices=["cpu"] * 2, chunks=1)
    with torch.no_grad(), without_warnings():
        for _ in range(2):
            pipe(torch.randn(2, 3, WIDTH))
        calls = CallStream(runner_of(pipe), lambda: pipe.training)
        gate.is_open.clear()
        gate.is_reached.clear()
        calls.begin(torch.randn(2, 5, WIDTH))
        assert gate.is_reached.wait(60)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            checked = pool.submit(calls.check_unchanged)
            concurrent.futures.wait([checked], timeout=0.5)  # longer than a check takes that does not wait
            gate.is_open.set()
            checked.result()
        calls.finish()


def after(first: Callable[[], None], then: Callable[[Call], PlannedCall]) -> Callable[[Call], PlannedCall]:
    def both(call: Call) -> PlannedCall:
        first()
        return then(call)

    return both


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_call_of_a_stream_keeps_while_the_next_one_is_planned_is_used(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, layers = model(kind), model(kind)
    pipe = GPipe(layers, [2, 3], devices=["cpu"] * 2, chunks=CHUNKS)
    for index, length in enumerate(LENGTHS[:4]):
        x = torch.randn(4, length, WIDTH, generator=torch.Generator().manual_seed(index))
        with torch.no_grad(), without_warnings(), monkeypatch.context() as patched:
            calls = CallStream(runner_of(pipe), lambda: pipe.training)
            planner = runner_of(pipe).planner
            patched.setattr(planner, "plan", after(calls.wait_for_all, planner.plan))
            calls.begin(x)
            calls.begin(2 * x)
            for batch in (x, 2 * x):
                assert torch.equal(calls.finish(), loop(plain, batch)), f"length {length}"

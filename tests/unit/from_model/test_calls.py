"""Odd code between blocks: its results are those of the plain loop, or it is refused."""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from gpipe_fast import GPipe
from gpipe_fast.from_model import calls
from gpipe_fast.from_model.capture import Given, capture_call

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
X = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(6, (7,), generator=torch.Generator().manual_seed(2))


class Model(nn.Module):
    """Four blocks, and a function of the model and of their output."""

    alpha = 1.0

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.drop = nn.Dropout(0.0)
        self.register_buffer("buffer", torch.zeros(6))
        self.scale = nn.Parameter(torch.ones(()))
        self.function, self.other = function, None

    def forward(self, x: Tensor, *more: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.function(self, x, *more)


def pipelined(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    inputs = inputs or (X,)
    return GPipe.from_model(Model(function), inputs, devices=["cpu"] * 2, balance=[2, 2], chunks=3, **options)


def equals_the_loop(model: Any, *inputs: Any) -> bool:
    inputs = inputs or (X,)
    ours = pytree.tree_leaves(model(*inputs))
    theirs = pytree.tree_leaves(model.plain_loop(*inputs))
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


class Straight(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def test_a_backward_of_ones_own_is_called() -> None:
    model = pipelined(lambda m, x: x + Straight.apply(x))
    gradients = []
    for run in (model, model.plain()):
        model.zero_grad()
        for part in X.chunk(3) if run is not model else [X]:
            run(part).sum().backward()
        gradients.append(model.blocks[0][0].weight.grad.clone())
    torch.testing.assert_close(*gradients)


def clamp_weights(model: Any, x: Tensor) -> Tensor:
    model.blocks[0][0].weight.data.clamp_(-0.1, 0.1)
    return x


def update_view(model: Any, x: Tensor) -> Tensor:
    model.buffer[:2].copy_(x.detach().mean(0)[:2])
    return x + model.buffer


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a view of a buffer": (update_view, "buffer is changed in place"),
    "data of a parameter": (clamp_weights, "weight is changed in place"),
    "time first": (lambda m, x: x.view(-1, 2, 3).transpose(0, 1).reshape(-1, 3), "another order"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_pipeline_would_not_repeat_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(RuntimeError, match=message):
        pipelined(function)


@dataclass
class Doubles:
    """An output that changes itself, and has an attribute that is no argument."""

    y: Any
    z: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.y, self.z = self.y * 2, self.y


def logs(model: Any, x: Tensor) -> Tensor:
    print("mean", x.mean(), x.shape)
    warnings.warn(f"careful with {x.shape}", stacklevel=1)
    logging.getLogger("model").warning("mean %s", x.mean())
    logging.info("layer %d", 1)
    return x * 2


def selects(model: Any, x: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), x[:, 0] > 0
    y[mask] = x[mask] * 2
    return x + y + (x > 0).nonzero().sum() + x[:, model.buffer == 0].sum()


EQUAL: dict[str, Callable[..., Any]] = {
    "logs": logs,
    "tensors of unknown sizes": selects,
    "equal tensors": lambda m, x: x * 2 if torch.equal(m.buffer, m.buffer * 1) else x,
    "unequal tensors": lambda m, x: x * 2 if m.buffer.equal(m.scale) else x,
    "close tensors": lambda m, x: x * 2 if torch.allclose(m.scale, m.scale + 1e-7, rtol=1e-3) else x,
    "inference mode": lambda m, x: x + inferred(x),
    "batch before length": lambda m, x: x.view(-1, 2, 3).reshape(-1, 3),
    "a number and a shape": lambda m, x: (x, x.dtype, None, 3),
}


def inferred(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x * 2


@pytest.mark.parametrize("name", EQUAL)
def test_odd_code_equals_the_plain_loop(name: str) -> None:
    assert equals_the_loop(pipelined(EQUAL[name]))


@pytest.mark.parametrize("how", ["block", "partial", "function"])
def test_a_checkpoint_around_a_block_is_that_of_the_pipeline(how: str) -> None:
    functions: dict[str, Callable[..., Any]] = {
        "block": lambda block: block,
        "partial": functools.partial,
        "function": lambda block: lambda x: block(x) * 1,
    }

    def checkpointed(model: Any, x: Tensor) -> Tensor:
        for block in model.inner:
            if model.checkpoints:
                x = checkpoint(functions[how](block), x, use_reentrant=False)
            else:
                x = block(x) * 1 if how == "function" else block(x)
        return x

    model = Squares(checkpointed)
    model.blocks = nn.ModuleList()
    model.inner = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)) for _ in range(4))
    gradients = []
    for model.checkpoints in (True, False):
        pipe = GPipe.from_model(model, (ROWS,), devices=["cpu"] * 2, balance=[2, 2], chunks=3)
        pipe.zero_grad()
        torch.manual_seed(1)
        y = pipe(ROWS)
        y.sum().backward()
        gradients.append([y, *(each.grad for each in model.parameters() if each.grad is not None)])
    assert len(gradients[0]) == len(gradients[1]) == 9
    assert all(map(torch.equal, *gradients))


def test_the_name_of_a_file_may_have_a_comma() -> None:
    scope: dict[str, Any] = {}
    exec(compile("def forward(model, x):\n    return x * x.std()\n", "a, block 1", "exec"), scope)
    assert equals_the_loop(pipelined(lambda m, x: scope["forward"](m, x)))


def test_outputs_of_dataclasses_are_initialised_once() -> None:
    model = pipelined(lambda m, x: Doubles(x))
    output = model(X)
    assert type(output) is Doubles
    assert torch.equal(output.y, torch.cat([model.plain()(part).y for part in X.chunk(3)]))
    assert torch.equal(output.z * 2, output.y)


def test_an_array_is_refused() -> None:
    with pytest.raises(RuntimeError, match="PyTorch cannot trace it"):
        pipelined(lambda m, x: x * float(ARRAY[0]))


ARRAY = np.array([3.0])


def freeze(model: Any) -> None:
    model.scale.requires_grad_(False)


CHANGES: dict[str, tuple[Callable[..., Any], Callable[[Any], object]]] = {
    "a buffer that is read": (lambda m, x: x * 2 if bool(m.buffer[0]) else x, lambda m: m.buffer.fill_(1)),
    "a parameter that is read": (
        lambda m, x: x * m.scale.item(),
        lambda m: nn.init.constant_(m.scale, 3.0),
    ),
    "an attribute of a module": (lambda m, x: x * (1 + m.drop.p), lambda m: setattr(m.drop, "p", 0.5)),
    "an attribute of the class": (lambda m, x: x * m.alpha, lambda m: setattr(Model, "alpha", 2.0)),
    "a deque": (lambda m, x: x * (m.other or [1])[-1], lambda m: setattr(m, "other", deque([2]))),
    "whether a parameter has a gradient": (lambda m, x: x * 2 if m.scale.requires_grad else x, freeze),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_after_the_first_call_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, change = CHANGES[name]
    monkeypatch.setattr(Model, "alpha", 1.0)
    model = pipelined(function)
    assert equals_the_loop(model)
    change(model)
    assert equals_the_loop(model)


WEIGHTS = torch.ones(6)
WEIGHTS[5] = 0.01


@pytest.mark.parametrize("changed", [False, True])
def test_weights_of_classes(changed: bool) -> None:
    class Weighted(Model):
        def __init__(self) -> None:
            super().__init__(lambda m, x, y: m.loss(x, y))
            self.loss = nn.CrossEntropyLoss(weight=torch.ones(6) if changed else WEIGHTS)

    model = GPipe.from_model(Weighted(), (X, Y), devices=["cpu"] * 2, balance=[2, 2], chunks=3)
    if changed:
        model(X, Y)
        model.loss.weight.copy_(torch.arange(6.0))
    for targets in (Y, torch.full((7,), 5), torch.tensor([5, 5, 5, 0, 0, 0, 1])):
        torch.testing.assert_close(model(X, targets), model.plain()(X, targets))


class Tokens(nn.Module):
    """Blocks on tokens with positions, a causal mask, and a function of their output."""

    def __init__(self, function: Callable[..., Any] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.positions = nn.Embedding(9, 6), nn.Embedding(64, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.function = function

    def forward(self, tokens: Tensor, weights: Tensor | None = None) -> Any:
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.positions(torch.arange(length))
        mask = torch.ones(length, length).tril()
        for block in self.blocks:
            x = torch.tanh(block(mask @ x / length)) + x
        return self.function(x if weights is None else x * weights[..., None])


def of_tokens(function: Callable[..., Any], *inputs: Tensor) -> Any:
    return GPipe.from_model(Tokens(function), inputs, devices=["cpu"] * 2, balance=[2, 2], chunks=3)


def tokens(batch: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch * length)
    return (
        torch.randint(9, (batch, length), generator=generator),
        torch.rand(batch, length, generator=generator),
    )


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The captures so far: whether all sizes that vary were symbols."""
    found: list[bool] = []

    def counted(model: nn.Module, given: Given, *args: Any) -> Any:
        found.append(bool(given.symbols) and not given.fixed)
        return capture_call(model, given, *args)

    monkeypatch.setattr(calls, "capture_call", counted)
    return found


SIZES = [(7, 5), (9, 5), (7, 11), (12, 3), (30, 64), (8, 17), (6, 2), (11, 29)]


def test_further_sizes_need_no_capture(captures: list[bool]) -> None:
    model = of_tokens(lambda x: {"sum": x.square().sum((1, 2)), "last": x[:, -1]}, *tokens(7, 5))
    for sizes in SIZES[:3]:
        assert equals_the_loop(model, *tokens(*sizes))
    before = list(captures)
    for sizes in SIZES[3:]:
        assert equals_the_loop(model, *tokens(*sizes))
    assert captures == before
    assert before.count(True) == 2  # the second one, because the length of the weights was a number


DECIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "a long one": lambda x: x * 2 if x.shape[1] > 16 else x + 1,
    "an odd one": lambda x: x * 2 if x.shape[1] % 2 else x + 1,
    "one of 11": lambda x: x * 2 if x.shape[1] == 11 else x + 1,
    "a product": lambda x: x * 2 if x.shape[0] * x.shape[1] > 30 else x + 1,
    "a quotient": lambda x: x[:, : x.shape[1] // 2 + 1] * (x.shape[1] // 3),
    "a root": lambda x: x / math.sqrt(x.shape[1]),
    "halves": lambda x: torch.stack(x.split(x.shape[1] // 2 + 1, dim=1)[0].unbind(-1)).permute(1, 2, 0),
}


@pytest.mark.parametrize("name", DECIDES)
def test_code_that_decides_by_a_length_does_so_in_each_call(name: str) -> None:
    model = of_tokens(DECIDES[name], *tokens(6, 5))
    for _, length in SIZES:
        assert equals_the_loop(model, *tokens(6, length))


def test_single_samples_and_tokens() -> None:
    model = of_tokens(lambda x: x.reshape(-1, 6).view(x.shape[0], -1, 6), *tokens(3, 5))
    for batch, length in [(3, 5), (3, 7), (4, 1), (1, 1), (1, 9), (7, 4)]:
        assert equals_the_loop(model, *tokens(batch, length))


def test_what_a_single_sample_would_change_is_refused() -> None:
    with pytest.raises(RuntimeError, match="for another batch size"):
        of_tokens(lambda x: x.sum((1, 2)).squeeze() * 2, *tokens(3, 5))(*tokens(4, 5))


class Reads(nn.Linear):
    """A block that reads elements, so that it runs on zeros, and has a function of its result."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(6, 6)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(super().forward(x) + int(x.flatten()[0] > 100))


# What a block does to a length.
RESIZES: dict[str, Callable[[Tensor], Tensor]] = {
    "the same": lambda x: x,
    "half": lambda x: x[:, ::2],
    "twice": lambda x: torch.cat([x, x], 1),
    "less": lambda x: x[:, 2:],
    "a number": lambda x: x[:, :3],
    "a product": lambda x: x.reshape(len(x), -1, 1).expand(-1, -1, 6),
}


def resizing(function: Callable[[Tensor], Tensor]) -> Any:
    model = Model(lambda _, x: x * x.shape[1])
    model.blocks[3] = Reads(function)
    return GPipe.from_model(model, (torch.randn(6, 8, 6),), devices=["cpu"] * 2, balance=[2, 2], chunks=3)


@pytest.mark.parametrize("name", RESIZES)
def test_sizes_of_what_a_block_returns_that_reads_elements(name: str) -> None:
    model = resizing(RESIZES[name])
    for length in (5, 8, 4, 7, 11):
        assert equals_the_loop(model, torch.randn(6, length, 6))


def test_a_size_that_a_block_limits_is_an_error_below_the_limit() -> None:
    model = resizing(lambda x: x[:, :6])
    assert equals_the_loop(model, torch.randn(6, 8, 6))
    with pytest.raises(RuntimeError, match=r"shape \(2, 4, 6\).*\(2, 6, 6\) was expected"):
        model(torch.randn(6, 4, 6))


@functools.lru_cache(8)
def table(length: int) -> Tensor:
    return torch.arange(length * 6.0).view(length, 6)


def test_a_module_between_blocks_may_be_given_sizes_as_keys() -> None:
    model = squares(
        lambda m, x: x + m.inner(x.shape, x.device),
        ROWS,
        function=lambda _, shape, at: table(shape[1]).to(at),
    )
    for length in (5, 4, 3):
        assert equals_the_loop(model, ROWS[:, :length])


class ThreePositions(Tokens):
    """Positions of three kinds come first, and samples second, as for images and videos in text."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Any:  # type: ignore[override]
        x = self.embedding(tokens) + self.positions(positions).sum(0)
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return x.sum((1, 2))


def test_an_input_may_have_its_samples_in_another_dimension() -> None:
    def inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(batch)
        return tokens(batch, length)[0], torch.randint(64, (3, batch, length), generator=generator)

    model = GPipe.from_model(ThreePositions(), inputs(7, 5), devices=["cpu"] * 2, balance=[2, 2], chunks=3)
    for sizes in [(7, 5), (9, 4), (8, 8), (12, 5)]:
        assert equals_the_loop(model, *inputs(*sizes))
        torch.testing.assert_close(model(*inputs(*sizes)), model.plain()(*inputs(*sizes)))


class KeepsCache(Tokens):
    """A decoder as others have it inside: it keeps a cache unless its configuration says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)

    def forward(self, tokens: Tensor) -> Any:  # type: ignore[override]
        x, cache = self.embedding(tokens), {} if self.config.use_cache else None
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
            if cache is not None:
                cache[len(cache)] = object()
        return x, cache


def test_decoders_inside_of_a_model_keep_no_cache() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.head = KeepsCache(), nn.Linear(6, 1)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.decoder(tokens)[0][:, -1])  # type: ignore[no-any-return]

    model = GPipe.from_model(Scores(), tokens(7, 5)[:1], devices=["cpu"] * 2, balance=[2, 2], chunks=3)
    assert equals_the_loop(model, *tokens(9, 6)[:1])
    assert model.decoder.config.use_cache is True


class Remembers(nn.Linear):
    """A block with a state of its own."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach().sum()
        return super().forward(x) if hasattr(self, "last") else x


def test_a_block_may_set_its_own_attributes() -> None:
    model = Tokens()
    model.blocks = nn.ModuleList(Remembers(6, 6) for _ in range(4))
    pipe = GPipe.from_model(model, tokens(7, 5)[:1], devices=["cpu"] * 2, balance=[2, 2], chunks=3)
    assert not hasattr(model.blocks[0], "last")
    assert equals_the_loop(pipe, *tokens(7, 5)[:1])


@functools.lru_cache
def cached_weights(length: int) -> Tensor:
    return torch.arange(1.0, length + 1)


def behind_a_wrapper(function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    cached = functools.lru_cache(function)

    def wrapper(length: int) -> Tensor:
        return cached(length)

    return wrapper


wrapped_weights = behind_a_wrapper(lambda length: torch.arange(2.0, length + 2))


class Weighs(nn.Linear):
    """A block that reads tensors of caches."""

    def forward(self, x: Tensor) -> Tensor:
        weights = cached_weights(x.shape[1]) + wrapped_weights(x.shape[1])
        return super().forward(x) * weights[:, None] / x.shape[1]


def test_caches_of_blocks_keep_no_fake_tensors() -> None:
    model = Tokens()
    model.blocks = nn.ModuleList(Weighs(6, 6) for _ in range(4))
    pipe = GPipe.from_model(model, tokens(7, 5)[:1], devices=["cpu"] * 2, balance=[2, 2], chunks=3)
    assert type(cached_weights(5)) is Tensor
    assert type(wrapped_weights(5)) is Tensor
    for sizes in SIZES:
        assert equals_the_loop(pipe, *tokens(*sizes)[:1])


class Squares(nn.Module):
    """A model whose blocks come after a function of it and its inputs."""

    def __init__(self, before: Callable[..., Tensor], modules: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.before, self.factor = before, 1.0
        self.weight = nn.Parameter(torch.ones(6))
        for name, module in (modules or {}).items():
            self.add_module(name, module)

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        x = self.before(self, x, *more)
        for block in self.blocks:
            x = block(x)
        return x


class Of(nn.Module):
    """A module that calls a function, and has a number."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.number = function, 1.0

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def squares(before: Callable[..., Tensor], *inputs: Tensor, function: Any = None) -> Any:
    torch.manual_seed(0)
    modules = {} if function is None else {"inner": Of(function)}
    options = {"devices": ["cpu"] * 2, "balance": [2, 2], "chunks": 3}
    return GPipe.from_model(Squares(before, modules), inputs, **options)


ALL, SOME = torch.ones(6, 5, dtype=torch.bool), torch.arange(30).view(6, 5) % 5 < 4
ROWS = torch.randn(6, 5, 6, generator=torch.Generator().manual_seed(3))
READS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "a truth": (lambda s, m: (m, bool(m.all())), lambda m, x, k: x * 2 if m.inner(k)[1] else x),
    "a sum": (lambda s, m: (m, int(m.sum())), lambda m, x, k: x * m.inner(k)[1]),
    "a part": (lambda s, m: m.float()[:, : int(m[0].sum())], lambda m, x, k: x + m.inner(k).sum()),
    "a number": (lambda s, m: (m, s.number), lambda m, x, k: x * m.inner(k)[1]),
    "an order": (
        lambda s, m: OrderedDict(first=m * s.number, second={0: m * 2.0}),
        lambda m, x, k: x + m.inner(k)["first"][..., None] + m.inner(k)["second"][0][..., None],
    ),
}


@pytest.mark.parametrize("name", READS)
def test_modules_that_return_what_they_read(name: str) -> None:
    function, before = READS[name]
    model = squares(before, ROWS, ALL, function=function)
    for masks in (ALL, SOME, ALL):
        assert equals_the_loop(model, ROWS, masks)
    model.inner.number = 3.0
    assert equals_the_loop(model, ROWS, ALL)


def zeroed_later(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    y = mask.clone()
    if y.any():
        x = x + 1
    if y.all():
        x = x * 2
    y.zero_()
    return x + y[..., None]


def test_what_is_read_is_not_what_it_becomes_later() -> None:
    model = squares(zeroed_later, ROWS, ALL)
    for columns in (0, 1, 2, 0, 5, 0):
        mask = ALL.clone()
        mask[:, 5 - columns :] = False
        assert equals_the_loop(model, ROWS, mask)


RANDOM: dict[str, Callable[..., Tensor]] = {
    "an order": lambda m, x: x[..., torch.rand(6).argsort().tolist()],
    "two draws": lambda m, x: x if torch.rand(()) < torch.rand(()) else -x,
    "an interval": lambda m, x: x if (torch.rand(()) - 0.5).abs() < 0.25 else -x,
}


@pytest.mark.parametrize("name", RANDOM)
def test_branches_by_random_numbers_are_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match="branches on a tensor"):
        squares(RANDOM[name], ROWS)


def test_a_branch_that_no_random_number_takes() -> None:
    assert equals_the_loop(squares(lambda m, x: x if torch.rand(()) < m.factor else -x, ROWS))


@pytest.mark.parametrize(
    "make", [lambda: ROWS.repeat(1, 2, 1)[:, :5], lambda: ROWS.repeat(1, 1, 2)[..., ::2]]
)
def test_parts_of_tensors_are_not_contiguous(make: Callable[[], Tensor]) -> None:
    model = squares(lambda m, x: x * 2 if x.is_contiguous() else x, ROWS)
    assert equals_the_loop(model, make())
    assert equals_the_loop(model, ROWS)


def test_attributes_of_parameters_stay() -> None:
    model = Squares(lambda m, x: x * m.weight * m.weight.scale)
    model.weight.scale = 3.0  # type: ignore[attr-defined]
    pipe = GPipe.from_model(model, (ROWS,), devices=["cpu"] * 2, balance=[2, 2], chunks=3)
    assert equals_the_loop(pipe, ROWS)
    model.weight.scale = 2.0  # type: ignore[attr-defined]
    assert equals_the_loop(pipe, ROWS)


@pytest.mark.parametrize("hidden", [(0, 4), (3, 4), (6, 4), (0, 0)])
def test_a_last_sample_alone_may_be_masked_otherwise(hidden: tuple[int, int]) -> None:
    model = squares(lambda m, x, k: x if k.all() else x * k[..., None], ROWS, ALL)
    mask = torch.ones(7, 5, dtype=torch.bool)
    mask[hidden] = False
    torch.testing.assert_close(model(ROWS[[*range(6), 0]], mask), model.plain()(ROWS[[*range(6), 0]], mask))


def test_single_samples_of_changing_lengths_need_no_capture(captures: list[bool]) -> None:
    model = of_tokens(lambda x: x.sum(1), *tokens(4, 5))
    model.chunks = 4
    for length in range(2, 40):
        assert equals_the_loop(model, *tokens(4, length))
        assert len(captures) < 9


def test_a_length_of_one_is_captured_by_itself() -> None:
    def summed(x: Tensor) -> Tensor:
        for index in range(x.shape[1]):
            x = x + x[:, index : index + 1]
        return x

    model = of_tokens(summed, *tokens(6, 5))
    for length in (5, 16, 1, 5, 1, 2):
        assert equals_the_loop(model, *tokens(6, length))


def test_a_recurrent_module_between_blocks() -> None:
    modules = {"lstm": nn.LSTM(6, 6, batch_first=True)}
    model = Squares(lambda m, x: m.lstm(x)[0], modules)
    pipe = GPipe.from_model(model, (ROWS,), devices=["cpu"] * 2, balance=[2, 2], chunks=3)
    assert equals_the_loop(pipe, ROWS)


def test_attributes_of_modules_may_change_what_they_return() -> None:
    def either(inner: Any, x: Tensor) -> Any:
        return x if inner.number == 1 else (x, x * 2)

    def before(model: Any, x: Tensor) -> Tensor:
        found = model.inner(x)
        return found[1] if isinstance(found, tuple) else found  # type: ignore[no-any-return]

    model = squares(before, ROWS, function=either)
    for number in (1.0, 2.0, 1.0, 2.0):
        model.inner.number = number
        assert equals_the_loop(model, ROWS)


class Notes(UserDict[Any, Any]):
    """A table as transformers has for keys and values that layers share."""


class Keeps(nn.Linear):
    """A block that writes to a table and reads from it, as it is told."""

    def __init__(self, writes: Any = None, reads: Any = None, clears: bool = False) -> None:
        super().__init__(6, 6)
        self.writes, self.reads, self.clears = writes, reads, clears

    def forward(self, x: Tensor, table: Any) -> Tensor:
        y = super().forward(x)
        if self.reads is not None:
            y = y * table[self.reads][0] + table[self.reads][1]
        if self.writes is not None:
            table[self.writes] = y.tanh(), y * 2
        if self.clears:
            table.clear()
        return y


class KeepsTables(nn.Module):
    """Blocks that share a table of a class, which is also read between them, and returned."""

    def __init__(self, kind: Any, clears: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        blocks = (Keeps("a"), Keeps("b", "a"), Keeps(None, "b"), Keeps("a", "a", clears), Keeps(3, "a"))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Any:
        table = self.kind()
        for index, block in enumerate(self.blocks):
            x = block(x, table=table) if index % 2 else block(x, table)
            if index == 1:
                x = x + table["b"][0]
                table["a"] = table["b"]
        return x, table[3], len(table)


@pytest.mark.parametrize("kind", [dict, UserDict, Notes])
@pytest.mark.parametrize("balance", [[1, 4], [3, 2], [2, 1, 2]])
def test_blocks_may_share_a_table(kind: Any, balance: list[int]) -> None:
    model = GPipe.from_model(
        KeepsTables(kind), (X,), devices=["cpu"] * len(balance), balance=balance, chunks=3
    )
    gradients = []
    for run in (model, model.plain_loop):
        model.zero_grad()
        (x, (kept, _), number) = run(X)
        (x * kept).sum().backward()
        gradients.append([x, kept, *(each.grad for each in model.parameters())])
        assert number == 3
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("kind", [dict, Notes])
def test_a_table_that_is_two_arguments_is_refused(kind: Any) -> None:
    def twice(model: Any, x: Tensor) -> Tensor:
        table = kind()
        for block in model.blocks:
            x = block(x, table, table)
        return x

    model = Squares(twice)
    model.blocks = nn.ModuleList(Of(lambda inner, x, table, same: x) for _ in range(2))
    with pytest.raises(RuntimeError, match="is passed between modules"):
        GPipe.from_model(model, (X,), devices=["cpu"] * 2, balance=[1, 1], chunks=3)


@pytest.mark.parametrize("kind", [dict, Notes])
def test_a_table_that_a_block_clears_is_refused(kind: Any) -> None:
    with pytest.raises(RuntimeError, match="writes to 'table'"):
        GPipe.from_model(KeepsTables(kind, clears=True), (X,), devices=["cpu"] * 2, chunks=3)


class Mine(nn.Parameter):
    """A parameter of a class of its own."""

    extra = 3.0

    def doubled(self) -> Tensor:
        return self * 2


ASKS_FOR_A_CLASS: dict[str, Callable[[Any], Any]] = {
    "isinstance": lambda w: isinstance(w, Mine),
    "type": lambda w: type(w) is Mine,
    "not the plain type": lambda w: type(w) is not nn.Parameter,
    "issubclass": lambda w: issubclass(type(w), Mine),
    "the name": lambda w: w.__class__.__name__ == "Mine",
    "an attribute": lambda w: getattr(w, "extra", None),
    "a method": lambda w: w.doubled() is not None,
}


@pytest.mark.parametrize("name", ASKS_FOR_A_CLASS)
def test_the_class_of_a_parameter_counts(name: str) -> None:
    ask = ASKS_FOR_A_CLASS[name]

    def scaled(model: Any, x: Tensor) -> Tensor:
        return x * model.weight if ask(model.weight) else x - 1

    if name != "a method":
        pipe = squares(scaled, ROWS)
        assert equals_the_loop(pipe, ROWS)
        pipe.weight = Mine(torch.ones(6))
        with pytest.raises(RuntimeError, match="class, Mine"):
            pipe(ROWS)
    model = Squares(scaled)
    model.weight = Mine(torch.ones(6))
    with pytest.raises(RuntimeError, match=r"class, Mine|cannot trace"):
        GPipe.from_model(model, (ROWS,), devices=["cpu"] * 2, balance=[2, 2], chunks=3)


def test_modules_decide_by_the_classes_of_their_own_parameters() -> None:
    def either(inner: Any, x: Tensor) -> Any:
        return (x * inner.weight, x) if isinstance(inner.weight, Mine) else x - 1

    def before(model: Any, x: Tensor) -> Tensor:
        found = model.inner(x)
        return found[0] if isinstance(found, tuple) else found * 3  # type: ignore[no-any-return]

    for kind in (nn.Parameter, Mine):
        plain = Squares(before, {"inner": Of(either)})
        plain.inner.weight = kind(torch.ones(6))  # type: ignore[union-attr]
        model = GPipe.from_model(plain, (ROWS,), devices=["cpu"] * 2, balance=[2, 2], chunks=3)
        assert equals_the_loop(model, ROWS)


class Counts(nn.Linear):
    """A block that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_a_branch_by_a_buffer_that_a_block_changes_is_refused() -> None:
    model = Squares(lambda m, x: x * 2 if m.blocks[0].calls.item() < 2 else x)
    model.blocks = nn.ModuleList(Counts() for _ in range(4))
    with pytest.raises(RuntimeError, match="'calls' of a Counts, which may change it"):
        GPipe.from_model(model, (ROWS,), devices=["cpu"] * 2, balance=[2, 2], chunks=3)


def test_the_first_call_is_captured_once(captures: list[bool]) -> None:
    model = of_tokens(lambda x: x.sum(1), *tokens(7, 5)[:1])
    assert captures == [True, False]  # once more for the last micro-batch, of one sample
    assert equals_the_loop(model, *tokens(7, 5)[:1])
    assert captures == [True, False]


def test_the_number_of_targets_becomes_a_tensor_on_the_device_of_the_inputs() -> None:
    given = {"input_ids": torch.empty(2, device="meta"), "num_items_in_batch": 3}
    assert [x.device.type for x in calls._inputs(nn.Module(), (), given).tensors] == ["meta", "meta"]

"""What users of torchgpipe rely on in a call, shown of both libraries: input, checkpoint modes, errors."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.torchgpipe.libraries import OURS, Library, Noting, Of, both, gradients, in_python, numbered

pytestmark = [pytest.mark.usefixtures("one_thread"), in_python]

every_mode = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
every_backend = pytest.mark.parametrize("backend", ["auto", "eager"])


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def noted(library: Library, **options: Any) -> tuple[Any, list[Noting]]:
    """Three stages that note what they are called for."""
    torch.manual_seed(0)
    layers = [Noting(library) for _ in range(3)]
    return library.make(nn.Sequential(*layers), [1, 1, 1], **options), layers


@both
@pytest.mark.parametrize(
    ("batch", "chunks", "sizes"),
    [
        *((8, 4, [2, 2, 2, 2]), (7, 4, [2, 2, 2, 1]), (5, 4, [2, 2, 1])),
        *((2, 4, [1, 1]), (1, 1, [1]), (0, 2, [0, 0])),
    ],
)
def test_a_mini_batch_is_cut_as_chunk_cuts_it(
    batch: int, chunks: int, sizes: list[int], library: Library
) -> None:
    pipe, layers = noted(library, chunks=chunks)
    x = numbered(batch)
    output = pipe(x)
    assert [layer.sizes for layer in layers] == [sizes] * 3
    torch.testing.assert_close(output, nn.Sequential(*layers)(x))


@both
def test_a_tuple_is_cut_and_joined_by_its_tensors(library: Library) -> None:
    swap = nn.Sequential(Of(lambda pair: (pair[1] * 2, pair[0])), Of(lambda pair: (*pair, pair[0])))
    x, y = numbered(7), numbered(7, 3)
    output = library.make(swap, [1, 1], chunks=4)((x, y))
    assert type(output) is tuple
    assert all(map(torch.equal, output, (y * 2, x, y * 2)))


@both
def test_the_input_may_be_named(library: Library) -> None:
    """As that of a Sequential, whatever the first layer calls its own."""
    module, x = nn.Sequential(Of(lambda x: x * 2), nn.Linear(6, 2)), numbered()
    torch.testing.assert_close(library.make(module, [1, 1], chunks=2)(input=x), module(input=x))


@both
@pytest.mark.parametrize(("input", "name"), [(3, "int"), ("x", "str"), (None, "NoneType"), ({1}, "set")])
def test_what_is_no_tensor_is_refused(input: object, name: str, library: Library) -> None:
    for module, balance in ((chain(), [2, 2]), (nn.Sequential(), [])):
        with pytest.raises(TypeError) as raised:
            library.make(module, balance)(input)
        assert str(raised.value).startswith(f"expected Tensor, but got {name}")


@both
def test_an_empty_sequential_returns_its_input(library: Library) -> None:
    pipe, x = library.make(nn.Sequential(), [], chunks=4), numbered()
    assert pipe(x) is x
    pair = (x, x)
    assert pipe(pair) is pair
    assert (len(pipe), list(pipe), len(pipe.partitions), pipe.devices) == (0, [], 0, [])


@both
@every_mode
@pytest.mark.parametrize("training", [True, False])
def test_a_mini_batch_without_samples(training: bool, checkpoint: str, library: Library) -> None:
    """As of the plain loop: no rows, gradients of zero, and batch norm's statistics with nothing in them."""
    module, plain = chain().train(training), chain().train(training)
    pipe = library.make(module, [2, 2], chunks=4, checkpoint=checkpoint).train(training)
    results = []
    for forward in (pipe, lambda x: torch.cat([plain(part) for part in x.chunk(4)])):
        x = numbered(0).requires_grad_()
        output = forward(x)
        output.sum().backward()
        results.append([output, x.grad])
    (ours, x_grad), (expected, _) = results
    assert ours.shape == expected.shape == (0, 4)
    assert x_grad is not None
    assert x_grad.shape == (0, 6)
    for found, wanted in zip(gradients(module), gradients(plain), strict=True):
        assert found is not None
        assert torch.equal(found, wanted)
    if library is OURS:
        for found, wanted in zip(module.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@every_backend
@every_mode
def test_a_mini_batch_without_samples_in_python(checkpoint: str, backend: str) -> None:
    pipe = GPipe(chain(), [2, 2], chunks=4, checkpoint=checkpoint, backend=backend)
    x = numbered(0).requires_grad_()
    for _ in range(2):
        pipe.zero_grad()
        pipe(x).sum().backward()
        assert all(g is not None and not g.any() for g in gradients(pipe))


class Drawing(nn.Module):
    """Random numbers, by whether they are drawn in a recompute, and by micro-batch."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.library, self.linear = library, nn.Linear(6, 6)
        self.drawn: dict[tuple[bool, float], Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        draw = torch.rand(3)
        self.drawn[bool(self.library.package.is_recomputing()), float(x.detach()[0, 0])] = draw
        y: Tensor = self.linear(x)
        return y


@both
@pytest.mark.parametrize(
    ("checkpoint", "phases"),
    [("always", "CCCCRRRR"), ("except_last", "CCCFRRR"), ("never", "FFFF")],
)
def test_checkpoint_says_which_micro_batches_recompute(
    checkpoint: str, phases: str, library: Library
) -> None:
    """Last micro-batch first; none in eval mode."""
    pipe, layers = noted(library, chunks=4, checkpoint=checkpoint)
    pipe(numbered()).sum().backward()
    assert [layer.phases for layer in layers] == [phases] * 3
    order = [first for phase, _, first in layers[0].seen if phase == "R"]
    assert order == sorted(order, reverse=True)
    for layer in layers:
        layer.seen.clear()
    pipe.eval()(numbered()).sum().backward()
    assert [layer.phases for layer in layers] == ["FFFF"] * 3


@both
def test_a_recompute_has_the_random_state_of_the_first_run(library: Library) -> None:
    drawing = Drawing(library)
    pipe = library.make(
        nn.Sequential(nn.Identity(), drawing, nn.Dropout()), [1, 2], chunks=4, checkpoint="always"
    )
    pipe(numbered()).sum().backward()
    draws = [drawing.drawn[False, first] for first in (0.0, 2.0, 4.0, 6.0)]
    assert len({tuple(draw.tolist()) for draw in draws}) == 4
    assert all(
        torch.equal(drawing.drawn[True, first], draw)
        for first, draw in zip((0.0, 2.0, 4.0, 6.0), draws, strict=True)
    )


class Planted(Exception):
    pass


def fail_at(layers: list[Noting], *places: tuple[int, str, float]) -> list[Planted]:
    """Lets stages fail in a phase, at the micro-batch that begins with a sample; returns their errors."""
    errors = []
    for stage, phases, sample in places:
        error = Planted(f"stage {stage}, sample {sample}")
        layers[stage].fails = lambda phase, first, p=phases, s=sample, e=error: (  # type: ignore[misc]
            e if phase in p and first == s else None
        )
        errors.append(error)
    return errors


def works(pipe: Any, layers: list[Noting]) -> None:
    """A step after an error is as that of the plain model."""
    for layer in layers:
        layer.fails = lambda phase, first: None
    results = []
    for model in (pipe, nn.Sequential(*layers)):
        pipe.zero_grad()
        output = model(numbered())
        output.square().sum().backward()
        results.append([output, *gradients(pipe)])
    torch.testing.assert_close(*results)


@both
@every_mode
def test_the_exception_of_a_stage_comes_out_of_the_call(checkpoint: str, library: Library) -> None:
    pipe, layers = noted(library, chunks=4, checkpoint=checkpoint)
    for stage in range(3):
        for sample in (0.0, 4.0, 6.0):
            (error,) = fail_at(layers, (stage, "FC", sample))
            with pytest.raises(Planted) as raised:
                pipe(numbered())
            assert raised.value is error
            works(pipe, layers)


@both
@pytest.mark.parametrize(
    ("places", "first"),
    [
        ([(0, "FC", 4.0), (1, "FC", 0.0)], 1),
        ([(0, "FC", 2.0), (1, "FC", 0.0)], 0),
        ([(0, "FC", 6.0), (1, "FC", 4.0), (2, "FC", 0.0)], 2),
        ([(0, "FC", 4.0), (1, "FC", 2.0), (2, "FC", 0.0)], 0),
    ],
    ids=["0F2 and 1F0", "0F1 and 1F0", "0F3, 1F2 and 2F0", "0F2, 1F1 and 2F0"],
)
def test_of_several_exceptions_the_first_in_schedule_order_comes_out(
    places: list[tuple[int, str, float]], first: int, library: Library
) -> None:
    """The sum of stage and micro-batch is the tick; within one the earlier stage counts as first."""
    pipe, layers = noted(library, chunks=4)
    for _ in range(5):
        errors = fail_at(layers, *places)
        with pytest.raises(Planted) as raised:
            pipe(numbered())
        assert raised.value is errors[first]
    works(pipe, layers)


@both
@pytest.mark.parametrize("stage", range(3))
def test_the_exception_of_a_recompute_comes_out_of_the_backward(stage: int, library: Library) -> None:
    pipe, layers = noted(library, chunks=4, checkpoint="always")
    for sample in (0.0, 4.0, 6.0):
        (error,) = fail_at(layers, (stage, "R", sample))
        output = pipe(numbered())
        with pytest.raises(Planted) as raised:
            output.sum().backward()
        assert raised.value is error
        works(pipe, layers)


@both
def test_concurrent_calls_from_several_threads(library: Library) -> None:
    """One of them fails, and the others do not notice."""
    pipe, layers = noted(library, chunks=4, checkpoint="never")
    (error,) = fail_at(layers, (1, "F", 100.0))
    inputs = [numbered() + 10 * index for index in range(3)]
    bad = numbered()
    bad[4:6, 0] = 100.0
    start = threading.Barrier(4)

    def step(model: Any, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        output = model(x)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), x)]

    def call(x: Tensor) -> list[list[Tensor] | Planted]:
        start.wait()
        found: list[list[Tensor] | Planted] = []
        for _ in range(10):
            try:
                found.append(step(pipe, x))
            except Planted as planted:
                found.append(planted)
        return found

    with ThreadPoolExecutor(4) as pool:
        *good, failed = pool.map(call, [*inputs, bad])
    assert all(planted is error for planted in failed)
    for results, x in zip(good, inputs, strict=True):
        expected = step(nn.Sequential(*layers), x)
        for result in results:
            torch.testing.assert_close(result, expected)


def test_what_we_take_and_torchgpipe_does_not() -> None:
    """Lists, dicts and numbers."""
    layer = Of(lambda value: value["x"][0] * value["n"])
    x = numbered()
    assert torch.equal(GPipe(nn.Sequential(layer), [1], chunks=2)({"x": [x], "n": 2}), x * 2)

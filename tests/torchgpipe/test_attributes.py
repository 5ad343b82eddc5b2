"""Names, attributes, device moves and casts that torchgpipe's users rely on, on both libraries."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gpipe_fast
from tests.reference import plain_loop
from tests.torchgpipe.libraries import (
    Library,
    both_libraries,
    numbered_samples,
)

pytestmark = pytest.mark.usefixtures("one_thread")

MOVING_DENIED = "denied to move parameters and buffers, because GPipe should manage device placement"


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    named = OrderedDict(a=nn.Linear(6, 6), norm=nn.LayerNorm(6), act=nn.Tanh(), b=nn.Linear(6, 6))
    return nn.Sequential(named)


@both_libraries
def test_constructor_arguments_have_defaults_and_are_converted_to_their_types(library: Library) -> None:
    class Mode:
        def __str__(self) -> str:
            return "never"

    pipe = library.make(layers(), [2, 2])
    assert (pipe.chunks, pipe.checkpoint) == (1, "except_last")
    pipe = library.make(layers(), iter((1, 3)), chunks="3", checkpoint=Mode(), devices=iter(["cpu"] * 3))
    assert (pipe.balance, pipe.chunks, pipe.checkpoint) == ([1, 3], 3, "never")
    assert pipe.devices == [torch.device("cpu")] * 2
    assert library.make(layers(), [4], chunks=2.0).chunks == 2
    for balance in (torch.tensor([1, 3]), [1.0, 3.0]):
        assert (pipe := library.make(layers(), balance, chunks=2)).balance == [1, 3]
        assert pipe(numbered_samples()).shape == (8, 6)


@both_libraries
def test_balance_and_devices_are_lists_without_unused_devices(library: Library) -> None:
    module = layers()
    pipe = library.make(module, (1, 3), devices=["cpu", torch.device("cpu", 0), "cpu"], chunks=4)
    assert type(pipe.balance) is type(pipe.devices) is list
    assert pipe.balance == [1, 3]
    assert pipe.devices == [torch.device("cpu"), torch.device("cpu", 0)]
    for device in ("cpu", "cpu:0"):
        output = library.make(module, [2, 2], devices=[device] * 2)(numbered_samples())
        torch.testing.assert_close(output, module(numbered_samples()))


@both_libraries
def test_partitions_hold_the_users_layers_under_their_names(library: Library) -> None:
    module = layers()
    pipe = library.make(module, [1, 3])
    assert type(pipe.partitions) is nn.ModuleList
    assert [type(partition) for partition in pipe.partitions] == [nn.Sequential] * 2
    named = [list(partition.named_children()) for partition in pipe.partitions]
    assert named == [[("a", module.a)], [("norm", module.norm), ("act", module.act), ("b", module.b)]]
    before = pipe.state_dict()
    pipe.partitions[1].eval()
    assert [layer.training for layer in pipe] == [True, False, False, False]
    assert pipe.state_dict().keys() == before.keys()


def test_partitions_are_a_read_only_view() -> None:
    """Modules and parameters are not listed twice, and `partitions` cannot be assigned."""
    module = layers()
    pipe = gpipe_fast.GPipe(module, [1, 3]).eval()
    assert [name for name, _ in pipe.named_modules()] == [name for name, _ in module.named_modules()]
    assert list(pipe.state_dict()) == list(module.state_dict())
    assert len(list(pipe.parameters())) == len(list(module.parameters()))
    assert [part.training for part in pipe.partitions] == [False, False]
    with pytest.raises(AttributeError, match="partitions cannot be set"):
        pipe.partitions = nn.ModuleList()
    with pytest.raises(AttributeError, match="memory is a method, got '1GiB'; set memory_limit"):
        pipe.memory = "1GiB"
    assert len(pipe) == 4
    pipe.a = nn.Linear(6, 6)
    assert pipe.partitions[0][0] is pipe.a
    assert list(copy.deepcopy(pipe).partitions[1].state_dict()) == list(pipe.partitions[1].state_dict())


@both_libraries
def test_a_pipeline_is_indexable_and_iterable_like_sequential(library: Library) -> None:
    module = layers()
    pipe = library.make(module, [1, 3])
    assert len(pipe) == 4
    assert list(pipe) == list(module)
    assert [pipe[i] for i in range(-4, 4)] == 2 * list(module)
    assert pipe[torch.tensor(1)] is module.norm
    for invalid_index in (slice(0, 2), "a", None):
        with pytest.raises(TypeError):
            pipe[invalid_index]
    for outside in (4, -5):
        with pytest.raises(IndexError):
            pipe[outside]


MOVES: list[Callable[[Any], object]] = [
    lambda pipe: pipe.cuda(),
    lambda pipe: pipe.cuda(0),
    lambda pipe: pipe.to("meta"),
    lambda pipe: pipe.to(0),
    lambda pipe: pipe.to(torch.ones(1, device="meta")),
    lambda pipe: pipe.to("meta", torch.float64),
    lambda pipe: pipe.to(device="meta"),
    lambda pipe: pipe.to(tensor=torch.ones(1, device="meta")),
]


@both_libraries
def test_moving_a_pipeline_to_a_device_is_denied(library: Library) -> None:
    pipe = library.make(layers(), [2, 2])
    for move in MOVES:
        with pytest.raises(TypeError) as raised:
            move(pipe)
        assert str(raised.value).startswith(MOVING_DENIED)
        assert {p.dtype for p in pipe.parameters()} == {torch.float32}


def test_gpipe_fast_accepts_the_device_that_all_stages_have() -> None:
    """It is refused by torchgpipe."""
    pipe = gpipe_fast.GPipe(layers(), [2, 2], devices=["cpu"] * 2, chunks=2)
    assert pipe.to("cpu") is pipe
    assert pipe.cpu() is pipe
    assert pipe.to(torch.ones(1, dtype=torch.float64)).a.weight.dtype == torch.float64


CASTS: list[tuple[torch.dtype, Callable[[Any], Any]]] = [
    (torch.float16, lambda pipe: pipe.half()),
    (torch.float64, lambda pipe: pipe.double()),
    (torch.float32, lambda pipe: pipe.double().float()),
    (torch.float64, lambda pipe: pipe.to(torch.float64, True)),
]


@both_libraries
def test_a_pipeline_can_be_cast_to_another_dtype(library: Library) -> None:
    """A pipeline may be cast after a step."""
    for dtype, cast in CASTS:
        module, x = layers(), numbered_samples()
        pipe = library.make(module, [2, 2], chunks=2)
        pipe(x).sum().backward()
        pipe.zero_grad()
        assert cast(pipe) is pipe
        expected = plain_loop(copy.deepcopy(module), x.to(dtype), 2)
        output = pipe(x.to(dtype))
        assert output.dtype == dtype
        assert torch.equal(output, expected)
        output.sum().backward()
        assert {p.grad.dtype for p in pipe.parameters()} == {dtype}

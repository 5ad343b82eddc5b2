"""The least-recently-used cache."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast._extension import Arena
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.program import ProgramIR
from gpipe_fast.lower.split import split
from gpipe_fast.runtime.cache import NATIVE_VALUE_BYTES, VALUE_BYTES, Cache, limit_bytes
from gpipe_fast.trace import layer_states
from gpipe_fast.trace.layer_states import LayerState
from tests.heap import heap_bytes
from tests.internals import eviction_of
from tests.models import gpt
from tests.stages import trace_joint

WIDTH = 4

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_least_recently_used_entry_is_evicted() -> None:
    cache: Cache[str, int] = Cache(2)
    cache["a"], cache["b"] = 1, 2
    assert cache.lookup("a") == 1
    cache["c"] = 3
    assert cache.entries() == [("a", 1), ("c", 3)]
    assert cache.lookup("b") is None
    assert len(cache) == 2


_Made = TypeVar("_Made")
COUNT = 10


def python_bytes(make: Callable[[], _Made]) -> tuple[list[_Made], int]:
    """Returns results of `COUNT` calls, and the bytes of the Python objects of one."""
    make()  # fills caches
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        made = [make() for _ in range(COUNT)]
        gc.collect()
        return made, (tracemalloc.get_traced_memory()[0] - before) // COUNT
    finally:
        tracemalloc.stop()


def within_a_factor_of_two(estimate: int, measured: int) -> bool:
    return measured / 2 <= estimate <= measured * 2


def stage() -> tuple[list[nn.Module], torch.Tensor]:
    return list(gpt())[1:4], torch.randn(2, 5, 16, requires_grad=True)


def programs() -> list[ProgramIR]:
    layers, x = stage()
    parts = split(trace_joint(layers, x), 0.0)
    assert parts.backward is not None
    return [lower(parts.forward), lower(parts.backward)]


def test_bytes_of_programs_as_data() -> None:
    layers, x = stage()
    graph = split(trace_joint(layers, x), 0.0).backward
    assert graph is not None
    made, measured = python_bytes(lambda: lower(graph))
    assert within_a_factor_of_two(VALUE_BYTES * made[0].num_values, measured)


def test_bytes_of_native_programs() -> None:
    lowered, device = programs(), torch.device("cpu")
    kept = [program.build(Arena(), device) for program in lowered]  # resolves the operators
    gc.collect()
    before = heap_bytes()
    for _ in range(COUNT):
        kept += [program.build(Arena(), device) for program in lowered]
    measured = (heap_bytes() - before) // COUNT
    assert within_a_factor_of_two(
        NATIVE_VALUE_BYTES * sum(program.num_values for program in lowered), measured
    )


def test_the_limit_follows_the_parameters_and_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GPIPE_FAST_PLANS_MIB", raising=False)
    for host, expected in ((2**34, 2**30), (2**40, 2**30), (2**32, 2**28)):
        monkeypatch.setattr("gpipe_fast.runtime.cache.device_memory_bytes", lambda _, host=host: host)
        assert limit_bytes([torch.empty(10)]) == expected
    assert limit_bytes([torch.empty(2**30, device="meta") for _ in range(2)]) == 2**33 // 8
    monkeypatch.setenv("GPIPE_FAST_PLANS_MIB", "1.5")
    assert limit_bytes([torch.empty(10)]) == 3 * 2**19
    assert eviction_of(GPipe(gpt(), [5])).limit == 3 * 2**19


def change_attribute(layer: nn.Linear, number: int) -> None:
    layer.in_features = WIDTH + number


def change_tensor(layer: nn.Linear, number: int) -> None:
    layer.weight.number = number  # type: ignore[assignment]


class Reads(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.in_features / WIDTH)


@pytest.mark.parametrize("change", [change_attribute, change_tensor])
def test_layers_that_change_before_each_call_keep_a_bounded_number_of_states(
    change: Callable[[nn.Linear, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Cache.__init__
    monkeypatch.setattr(Cache, "__init__", lambda self, limit: make(self, min(limit, 2)))
    monkeypatch.setattr(layer_states, "_MAX_STATES", 2)
    monkeypatch.setattr(layer_states, "_MAX_DESCRIPTIONS", 2)
    layer = Reads(WIDTH, WIDTH)
    pipe = GPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=1)

    def calls(numbers: Iterable[int]) -> int:
        known = weakref.WeakSet(living(LayerState))
        for number in numbers:
            change(layer, number)
            output = pipe(torch.ones(1, WIDTH))
            assert torch.equal(output, layer(torch.ones(1, WIDTH)))
            del output
        return sum(state not in known for state in living(LayerState))

    calls(range(8))
    few = calls(range(8, 16))
    assert calls(range(16, 32)) <= few


def living(cls: type) -> list[Any]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is cls]

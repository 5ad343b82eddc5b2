"""Eviction: plans stay within their limit of bytes, and evicted signatures work again."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, fx, nn

from gpipe_fast import GPipe
from tests.internals import compiled_stages, compiler_of, eviction_of, num_plans, plan_of, stages_of
from tests.models import gpt
from tests.reference import collect, loop_step, pipeline, pipeline_step, restored, unequal
from tests.untraceable import FunctionLayer, branch_on_data

pytestmark = pytest.mark.usefixtures("one_thread")


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(length))


LENGTHS = (5, 9, 7, 12, 30, 22, 3)


def small() -> nn.Sequential:
    """Returns layers that trace fast."""
    torch.manual_seed(0)
    first = nn.Embedding(11, 8), nn.Linear(8, 8)
    return nn.Sequential(*first, nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mib", "most"), [("0", 1), ("1.2", 3), ("100", len(LENGTHS))])
def test_many_lengths_stay_within_the_limit(mib: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPIPE_FAST_PLANS_MIB", mib)
    layers = gpt()
    pipe = GPipe(layers, [2, 3], chunks=2)
    kept = []
    for length in LENGTHS:
        x = tokens(4, length)
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == [], length
        kept.append(num_plans(pipe))
        assert kept[-1] == 1 or eviction_of(pipe).num_bytes() <= float(mib) * 2**20
    assert 1 <= max(kept) <= most
    assert (max(kept) == 1) == (mib == "0")
    assert eviction_of(pipe).num_evicted == len(LENGTHS) - kept[-1]


def test_an_evicted_length_works_again_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = small()
    pipe = GPipe(layers, [2, 3], chunks=2)
    for length in (5, 9, 7, 12):
        pipeline_step(pipe, tokens(4, length))
    traces, eviction = compiler_of(pipe).num_traces, eviction_of(pipe)
    monkeypatch.setattr(eviction, "limit", 0)
    for length in (26, 7, 12, 7):
        x = tokens(4, length)
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == [], length
        assert num_plans(pipe) == 1
    assert compiler_of(pipe).num_traces == traces


def test_eviction_before_the_backward_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mini-batch keeps its own programs; those of its signature are evicted meanwhile."""
    monkeypatch.setenv("GPIPE_FAST_PLANS_MIB", "0")
    layers, x = small(), tokens(4, 9)
    pipe = GPipe(layers, [2, 3], chunks=2)
    with restored(pipe):
        output = pipeline(pipe, x)
        stages = compiled_stages(pipe)
        programs = [weakref.ref(each) for stage in stages for each in (stage, stage.traced)]
        del stages
        for length in (5, 7, 12):
            pipe(tokens(4, length))
        gc.collect()
        assert [ref() for ref in programs if ref() is not None] == []
        ours = collect(pipe, x, output)
    assert unequal(ours, loop_step(layers, x, 2)) == []


def test_graphs_made_from_a_template_are_dropped() -> None:
    def num_graphs() -> int:
        return sum(isinstance(each, fx.GraphModule) for each in gc.get_objects())

    pipe = GPipe(small(), [2, 3], chunks=2)
    for length in (5, 9, 7):
        pipe(tokens(4, length))
    before = num_graphs()
    pipe(tokens(4, 12))
    assert num_graphs() == before


def test_another_checkpoint_mode_after_the_graph_was_dropped() -> None:
    layers = small()
    pipe = GPipe(layers, [2, 3], chunks=2, checkpoint="always")
    for length in (5, 9, 7, 12):
        pipeline_step(pipe, tokens(4, length))
    traces = compiler_of(pipe).num_traces
    pipe.checkpoint = "never"
    x = tokens(4, 12)
    assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == []
    assert compiler_of(pipe).num_traces == traces


@pytest.mark.filterwarnings("ignore:.*runs in Python")
def test_stages_between_python_layers_stay_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPIPE_FAST_PLANS_MIB", "0.12")
    layers = nn.Sequential(nn.Linear(8, 8), FunctionLayer(branch_on_data), nn.Linear(8, 4))
    pipe = GPipe(layers, [2, 1], chunks=2)
    kept = []
    for length in (4, 8, 6, 10, 12, 4, 14):
        x = torch.randn(4, length, 8)
        for _ in range(3):
            assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == [], length
        kept.append(len(compiled_stages(pipe)))
        assert eviction_of(pipe).num_bytes() <= 0.12 * 2**20 or num_plans(pipe) == 1
    assert max(kept) > 0


def test_templates_of_layers_without_a_plan_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """In eval mode, layers have other templates; those for training go with the last plan for training."""
    layers = small()
    pipe = GPipe(layers, [5], chunks=2)
    for length in (5, 9, 7):
        pipe(tokens(4, length))
    monkeypatch.setattr(eviction_of(pipe), "limit", 0)
    pipe(tokens(4, 12))
    training = compiler_of(pipe).template_bytes()
    pipe(tokens(4, 11))
    assert compiler_of(pipe).template_bytes() == training
    layers.eval()
    x = tokens(4, 12)
    assert torch.equal(pipe.eval()(x), layers(x))
    assert 0 < compiler_of(pipe).template_bytes() < training
    assert unequal(pipeline_step(pipe.train(), x), loop_step(layers.train(), x, 2)) == []


def test_a_new_plan_releases_the_cached_blocks_of_other_sizes() -> None:
    pipe = GPipe(nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256)), [2], chunks=1, checkpoint="always")
    (stage,) = stages_of(pipe)
    pipeline_step(pipe, torch.randn(512, 256))
    assert stage.arena.cached_bytes > 0
    plan_of(pipe, torch.randn(256, 256))
    assert stage.arena.cached_bytes == 0

"""GPipe compared with the plain micro-batch loop, and the behaviour that torchgpipe's users rely on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe, keyed_rng, replicate
from gpipe_fast.schedule import Kind
from tests.internals import latest_plan
from tests.models import MODELS, features, mlp, noisy, uneven_balance
from tests.reference import (
    loop_step,
    pipeline_step,
    plain_loop,
    unequal,
)
from tests.untraceable import FunctionLayer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["gpt", "convolutions", "dropout"])
def test_inference_equals_the_plain_loop(name: str) -> None:
    make, batch = MODELS[name]
    model, x = make().eval(), batch(8)
    pipe = GPipe(model, uneven_balance(len(model), 3), chunks=4)
    expected = plain_loop(model, x, 4)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with mode:
            assert torch.equal(pipe(x), expected)
    pipe.train()
    assert model[0].training
    assert pipe(x).requires_grad


def test_dropout_in_eval_mode_runs_natively_in_inference_mode() -> None:
    kinds = (nn.Dropout, nn.AlphaDropout, nn.Dropout2d, nn.FeatureAlphaDropout)
    layers = nn.Sequential(nn.Linear(4, 4), *(kind() for kind in kinds))
    model = GPipe(layers, [1, 4], devices=["cpu"] * 2, chunks=2, backend="aten").eval()
    x = torch.randn(4, 2, 4, 4)
    with torch.inference_mode():
        assert torch.equal(model(x), torch.cat([layers(part) for part in x.chunk(2)]))


def test_a_mini_batch_without_random_layers_leaves_the_generator_unchanged() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
    pipe, x = GPipe(model, [2], chunks=2), features()
    before = torch.get_rng_state()
    pipe.eval()(x)
    with keyed_rng(model):
        model(x)
    assert torch.equal(torch.get_rng_state(), before)
    pipe.train()(x)
    assert not torch.equal(torch.get_rng_state(), before)


def test_an_empty_sequential_returns_its_input() -> None:
    """Nothing is cut, so the input needs no batch; there is no stage, so it may be on any device."""
    pipe, x, mask = GPipe(nn.Sequential()), features(), torch.ones(1)
    for given in (x, torch.tensor(1.0), torch.ones(0), (x, mask), {"a": x, "b": 1}):
        assert pipe(given) is given
    assert pipe(input=x) is x
    assert pipe((x, replicate(mask)))[1] is mask
    for nothing in (3, (), None):
        with pytest.raises(TypeError, match=f"expected Tensor, but got {type(nothing).__name__}"):
            pipe(nothing)


def test_the_checkpoint_mode_selects_the_micro_batches_that_recompute() -> None:
    """Each stage has its share of saved activations, or its mode."""
    pipe = GPipe(mlp(), [2, 3], chunks=4, checkpoint=(0.25, "except_last"), backend="eager")
    expected = [(0, 3), (0, 2), (0, 1), (0, 0), (1, 2), (1, 1), (1, 0)]
    for mode, actions in ((pipe.train, expected), (pipe.eval, [])):
        mode()(features())
        rows = latest_plan(pipe).schedule.stages
        assert [(a.stage, a.microbatch) for row in rows for a in row if a.kind is Kind.R] == actions
    with pytest.raises(ValueError, match="checkpoint has 3 values, but the model has 2 stages"):
        pipe.checkpoint = [0.1, 0.2, 0.3]
    assert pipe.checkpoint == (0.25, "except_last")
    pipe.balance = [1, 1, 3]
    with pytest.raises(ValueError, match="checkpoint has 2 values, but the model has 3 stages"):
        pipe(features())


def test_chunks_auto_makes_up_to_four_micro_batches_per_stage() -> None:
    pipe = GPipe(mlp(), [2, 3], chunks="auto", backend="eager")
    for batch_size, expected in ((5, 5), (8, 8), (40, 8), (0, 1)):
        x = features(batch_size)
        with pipe.recording() as recording:
            output = pipe(x)
        assert recording.phases()[0].num_microbatches == expected
        assert torch.equal(output, plain_loop(nn.Sequential(*pipe), x, expected))


def sorting(number: int) -> nn.Module:
    """Returns a layer whose time grows with a number of values, but not its number of parameters."""
    values = torch.rand(number)
    return FunctionLayer(lambda held, x: held(x) + values.sort().values[0], nn.Linear(32, 32))


def test_without_a_balance_layers_are_measured() -> None:
    """The first call with samples does. Its results are unaffected, including dropout's random draws."""
    torch.manual_seed(0)
    x = torch.randn(8, 32)
    rest = [nn.Dropout(0.5), nn.BatchNorm1d(32), *(sorting(1) for _ in range(3))]
    model = nn.Sequential(sorting(300_000), *rest)
    expected = loop_step(model, x, 4)
    pipe = GPipe(model, devices=["cpu", "cpu"], chunks=4)
    with torch.no_grad():
        assert pipe.eval()(torch.randn(0, 32)).shape == (0, 32)
    assert pipe.balance == [4, 2]
    assert unequal(pipeline_step(pipe.train(), x), expected) == []
    assert pipe.balance == [1, 5]
    assert [len(partition) for partition in pipe.partitions] == [1, 5]
    assert unequal(pipeline_step(pipe, x), expected) == []


def test_layers_that_do_not_fit_into_memory_are_refused_by_name() -> None:
    """The check comes before any change to a layer."""
    large = nn.Linear(1, 1, bias=False)
    module = nn.Sequential(OrderedDict(small=nn.Linear(1, 1), large=large))
    for device in ("cpu", "meta"):
        large.weight = nn.Parameter(torch.empty(1, device=device).expand(1 << 50))
        with pytest.raises(ValueError, match=r"layer 'large' \(Linear\) needs 8388608\.0 GiB .*, and cpu"):
            GPipe(module, [1, 1])


@pytest.mark.smoke
def test_changes_between_calls_take_effect() -> None:
    """Contract 5: nothing stale."""
    pipe, x = GPipe(noisy(), [2, 4], chunks=4), features()
    changes: dict[str, Callable[[], object]] = {
        "all frozen but the last": lambda: [layer.requires_grad_(False) for layer in list(pipe)[:-1]],
        "parameter replaced": lambda: setattr(pipe[1], "weight", nn.Parameter(torch.rand(8, 6))),
        "data replaced": lambda: setattr(pipe[1].weight, "data", torch.ones(8, 6)),
        "other shape": lambda: (setattr(pipe[1], "out_features", 8), setattr(pipe[1], "bias", None)),
        "dropout.p": lambda: setattr(pipe[2], "p", 0.9),
        "eval of a layer": lambda: pipe[2].eval(),
        "layer replaced": lambda: setattr(pipe, "3", nn.Tanh()),
    }
    after = pipeline_step(pipe, x)
    for name, change in changes.items():
        before = after
        change()
        expected = loop_step(nn.Sequential(*pipe), x, 4)
        after = pipeline_step(pipe, x)
        assert unequal(after, expected) == [], name
        assert after.keys() != before.keys() or unequal(after, before) != [], name

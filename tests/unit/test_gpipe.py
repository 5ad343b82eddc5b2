"""GPipe compared with the plain micro-batch loop, and the behaviour that torchgpipe's users rely on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, keyed_rng, replicate
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE, NO_RECOMPUTE
from gpipe_fast.runtime.plan import make_plan
from gpipe_fast.schedule import Kind
from tests.internals import latest_plan, stages_of
from tests.models import (
    Batch,
    Model,
    convolutions,
    every_model,
    features,
    mlp,
    noisy,
    tokens,
    uneven_balance,
)
from tests.reference import (
    check_step,
    leaf,
    loop_step,
    pipeline,
    pipeline_step,
    plain_loop,
    restored,
    unequal,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("batch_size", "chunks", "sizes"),
    [(7, 4, [2, 2, 2, 1]), (5, 4, [2, 2, 1]), (2, 4, [1, 1]), (1, 8, [1]), (0, 4, [0] * 4)],
)
def test_mini_batches_are_cut_as_by_chunk(batch_size: int, chunks: int, sizes: list[int]) -> None:
    assert [len(c) for c in features(batch_size).chunk(chunks)] == sizes
    check_step(mlp(), features(batch_size), chunks, [2, 3])


@pytest.mark.smoke
@every_model
def test_inference_equals_the_plain_loop(make: Model, batch: Batch) -> None:
    model, x = make().eval(), batch(8)
    pipe = GPipe(model, uneven_balance(len(model), 3), chunks=4)
    expected = plain_loop(model, x, 4)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with mode:
            assert torch.equal(pipe(x), expected)
    pipe.train()
    assert model[0].training
    assert pipe(x).requires_grad


@pytest.mark.parametrize("kind", [nn.Dropout, nn.AlphaDropout, nn.Dropout2d, nn.FeatureAlphaDropout])
def test_dropout_in_eval_mode_runs_natively_in_inference_mode(kind: type[nn.Module]) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), kind())
    model = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, backend="aten").eval()
    x = torch.randn(4, 2, 4, 4)
    with torch.inference_mode():
        assert torch.equal(model(x), torch.cat([layers(part) for part in x.chunk(2)]))


def test_autocast_equals_the_plain_loop() -> None:
    """The loop runs without autocast's weight cache. Layer norm's statistics stay in float32."""
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
    results = []
    for forward in (GPipe(model, [2, 2], chunks=2), lambda x: plain_loop(model, x, 2)):
        with restored(model):
            x = leaf(features())
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                y = forward(x)
            y.float().square().sum().backward()
            results.append([y, x.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_equal_the_plain_loop(dtype: torch.dtype) -> None:
    check_step(mlp().to(dtype), features().to(dtype), 4, [2, 3])


@pytest.mark.parametrize(
    "x",
    [features().t().contiguous().t(), features(1).expand(8, 6), features(16)[::2], features()],
    ids=["transposed", "expanded", "strided", "contiguous"],
)
def test_strided_inputs_equal_the_plain_loop(x: Tensor) -> None:
    check_step(mlp(), x, 4, [2, 3])


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


def test_state_dict_is_the_sequentials() -> None:
    model = convolutions()
    pipe = GPipe(convolutions(), [3, 3])
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert [n for n, _ in pipe.named_parameters()] == [n for n, _ in model.named_parameters()]
    with torch.no_grad():
        model[0].weight.fill_(7.0)
    pipe.load_state_dict(model.state_dict())
    assert torch.equal(pipe[0].weight, model[0].weight)
    model.load_state_dict(pipe.state_dict())


def test_a_pipeline_is_a_container_of_the_users_layers() -> None:
    model = mlp()
    pipe = GPipe(model, [2, 3], chunks=2.0, checkpoint="never")  # type: ignore[arg-type]
    assert len(pipe) == 5
    assert list(pipe) == list(model)
    assert pipe[0] is model[0]
    assert pipe[-1] is model[4]
    assert (pipe.balance, pipe.chunks, pipe.checkpoint) == ([2, 3], 2, "never")
    assert pipe.devices == [torch.device("cpu")] * 2
    with pytest.raises(TypeError, match="layers are indexed by integers, got slice; for several layers"):
        pipe[0:2]  # type: ignore[index]
    with pytest.raises(IndexError):
        pipe[5]


@pytest.mark.parametrize(
    "x",
    [
        features(),
        torch.tensor(1.0),
        torch.ones(0),
        (torch.ones(2), torch.ones(3)),
        {"a": torch.ones(2), "b": 1},
    ],
    ids=["batch", "no dimension", "empty batch", "unequal batches", "nested"],
)
def test_an_empty_sequential_returns_its_input(x: Any) -> None:
    """Nothing is cut, so the input needs no batch; there is no stage, so it may be on any device."""
    assert GPipe(nn.Sequential())(x) is x


def test_an_empty_sequential_checks_its_arguments() -> None:
    pipe, x, mask = GPipe(nn.Sequential()), features(), torch.ones(1)
    returned = pipe((x, replicate(mask)))
    assert returned[0] is x
    assert returned[1] is mask
    assert pipe(input=x) is x
    for nothing in (3, (), None):
        with pytest.raises(TypeError, match=f"expected Tensor, but got {type(nothing).__name__}"):
            pipe(nothing)
    message = r"takes one positional argument and returns it, got 2 arguments \(1 by keyword\)"
    with pytest.raises(TypeError, match=message):
        pipe(x, mask=mask)


@pytest.mark.parametrize(
    ("checkpoint", "expected"), [("always", "RRRR"), ("except_last", "RRR-"), ("never", "----")]
)
def test_the_checkpoint_mode_selects_the_micro_batches_that_recompute(checkpoint: str, expected: str) -> None:
    pipe = GPipe(mlp(), [5], chunks=4, checkpoint=checkpoint)
    with mock.patch("gpipe_fast.runtime.planner.make_plan", side_effect=make_plan) as made:
        pipe(features())
        pipe.eval()(features())
    (in_training,), (in_eval,) = (call.args[3] for call in made.call_args_list)
    assert "".join("R" if budget == FULL_RECOMPUTE else "-" for budget in in_training) == expected
    assert in_eval == [NO_RECOMPUTE] * 4


def test_each_stage_has_a_share_or_a_mode() -> None:
    pipe = GPipe(mlp(), [2, 2, 1], chunks=4, checkpoint=[0.25, "except_last", 1])
    assert pipe.checkpoint == (0.25, "except_last", 1.0)
    with mock.patch("gpipe_fast.runtime.planner.make_plan", side_effect=make_plan) as made:
        pipe(features())
    assert made.call_args.args[3] == [[0.25] * 4, [0.0, 0.0, 0.0, 1.0], [1.0] * 4]
    schedule = latest_plan(pipe).schedule
    recompute = [(a.stage, a.microbatch) for row in schedule.stages for a in row if a.kind is Kind.R]
    assert recompute == [(0, 3), (0, 2), (0, 1), (0, 0), (1, 2), (1, 1), (1, 0)]


def test_a_list_has_a_value_for_each_stage() -> None:
    pipe = GPipe(mlp(), [2, 3], chunks=2, checkpoint=0.5)
    with pytest.raises(ValueError, match="checkpoint has 3 values, but the model has 2 stages"):
        pipe.checkpoint = [0.1, 0.2, 0.3]
    assert pipe.checkpoint == 0.5
    pipe.checkpoint = ["always", 0.2]
    pipe.balance = [1, 1, 3]
    with pytest.raises(ValueError, match="checkpoint has 2 values, but the model has 3 stages"):
        pipe(features())


@pytest.mark.parametrize(("batch_size", "expected"), [(5, 5), (8, 8), (40, 8), (0, 1)])
def test_chunks_auto_makes_up_to_four_micro_batches_per_stage(batch_size: int, expected: int) -> None:
    pipe, x = GPipe(mlp(), [2, 3], chunks="auto"), features(batch_size)
    assert pipe.chunks == "auto"
    with pipe.recording() as recording:
        output = pipe(x)
    assert recording.phases()[0].num_microbatches == expected
    assert torch.equal(output, plain_loop(nn.Sequential(*pipe), x, expected))


class Sorting(nn.Module):
    """A layer whose cost grows with the number of values that it sorts, with a fixed number of parameters."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("values", torch.rand(number))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x) + self.values.sort().values[0]
        return found


def test_without_a_balance_layers_are_measured() -> None:
    """The first call measures the layers. Its results are unaffected, including dropout's random draws."""
    torch.manual_seed(0)
    x = torch.randn(8, 32)
    model = nn.Sequential(
        Sorting(300_000), nn.Dropout(0.5), nn.BatchNorm1d(32), *(Sorting(1) for _ in range(5))
    )
    expected = loop_step(model, x, 4)
    pipe = GPipe(model, devices=["cpu", "cpu"], chunks=4)
    assert len(pipe.balance) == len(pipe.devices) == 2
    assert unequal(pipeline_step(pipe, x), expected) == []
    assert pipe.balance == [1, 7]
    assert [len(partition) for partition in pipe.partitions] == [1, 7]
    assert unequal(pipeline_step(pipe, x), expected) == []


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copies")


def test_layers_that_cannot_be_measured_are_cut_evenly() -> None:
    model = nn.Sequential(Uncopyable(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    pipe, x = GPipe(model, devices=["cpu"] * 2, chunks=8), torch.randn(8, 4)
    with pytest.warns(UserWarning, match=r"balanced by parameter count, .* failed: layer '0' .*: no copies"):
        y = pipe(x)
    assert pipe.balance == [2, 2]
    assert torch.equal(y, torch.cat([model(c) for c in x.chunk(8)]))


def test_an_empty_batch_postpones_the_measurement() -> None:
    model = nn.Sequential(Sorting(300_000), *(Sorting(1) for _ in range(3)))
    pipe = GPipe(model, devices=["cpu"] * 2, chunks=8)
    assert pipe(torch.randn(0, 32)).shape == (0, 32)
    assert pipe.balance == [2, 2]
    pipe(torch.randn(8, 32))
    assert pipe.balance == [1, 3]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_that_do_not_fit_into_memory_are_refused_by_name(device: str) -> None:
    """The check comes before any change to a layer."""
    large = nn.Linear(1, 1, bias=False)
    large.weight = nn.Parameter(torch.empty(1, device=device).expand(1 << 50))
    module = nn.Sequential(OrderedDict(small=nn.Linear(1, 1), large=large))
    with pytest.raises(ValueError, match=r"layer 'large' \(Linear\) needs 8388608\.0 GiB .*, and cpu has "):
        GPipe(module, [1, 1])


TIED = nn.Linear(4, 4), nn.Linear(4, 4)
TIED[1].weight = TIED[0].weight
ERRORS: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (ValueError, "number of chunks must be positive integer", lambda: GPipe(mlp(), [5], chunks=0)),
    (
        ValueError,
        "checkpoint is not one of 'always', 'except_last'",
        lambda: GPipe(mlp(), [5], checkpoint="no"),
    ),
    (TypeError, "module must be nn.Sequential to be partitioned", lambda: GPipe(nn.Linear(1, 1), [1])),
    (ValueError, "module with duplicate children", lambda: GPipe(nn.Sequential(*[TIED[0]] * 2), [2])),
    (
        ValueError,
        r"module and sum of balance have different length \(module: 5, sum of balance: 4\)",
        lambda: GPipe(mlp(), [2, 2]),
    ),
    (
        ValueError,
        r"all balance numbers must be positive integer \(balance: \[5, 0\]\)",
        lambda: GPipe(mlp(), [5, 0]),
    ),
    (
        IndexError,
        r"too few devices to hold given partitions \(devices: 1, partitions: 2\)",
        lambda: GPipe(mlp(), [2, 3], devices=["cpu"]),
    ),
    (
        ValueError,
        "number of chunks must be positive integer or 'auto'",
        lambda: GPipe(mlp(), [5], chunks="x"),
    ),  # type: ignore[arg-type]
    (ValueError, "backend is not one of 'auto', 'aten', 'eager', got 'c'", lambda: GPipe(mlp(), backend="c")),
    (TypeError, "expected Tensor, but got int", lambda: GPipe(mlp(), [5])(3)),
    (ValueError, "has no dimension to split", lambda: GPipe(mlp(), [5])(torch.tensor(1.0))),
]


@pytest.mark.parametrize(("kind", "message", "call"), ERRORS, ids=[m for _, m, _ in ERRORS])
def test_wrong_arguments_are_refused(kind: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_arguments_are_checked_in_order() -> None:
    for first, second in (({"chunks": 0}, {"checkpoint": "no"}), ({"checkpoint": "no"}, {"balance": [9]})):
        with pytest.raises(ValueError, match=next(iter(first))):
            GPipe(nn.Linear(1, 1), **{"balance": [1], **first, **second})  # type: ignore[arg-type]


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_an_untraceable_layer_is_named() -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), Branch()), [1, 2], backend="aten")
    with pytest.raises(
        RuntimeError, match=r"stage 1, layer 2 \(Branch\) cannot be traced faithfully: .*Data"
    ):
        pipe(features())


def test_a_failed_call_changes_nothing_and_the_next_one_works() -> None:
    model = nn.Sequential(nn.Embedding(11, 6), nn.Flatten(), nn.BatchNorm1d(30), nn.Linear(30, 2))
    pipe, x, bad = GPipe(model, [2, 2], chunks=2), tokens(), tokens()
    bad[-1, -1] = 11
    expected = loop_step(model, x, 2)
    before = {k: v.clone() for k, v in pipe.state_dict().items()}
    with pytest.raises(IndexError, match="index out of range"):
        pipe(bad)
    assert all(torch.equal(v, before[k]) for k, v in pipe.state_dict().items())
    assert unequal(pipeline_step(pipe, x), expected) == []


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_unused_parameters_get_no_gradient() -> None:
    model = nn.Sequential(HalfUsed(), nn.Linear(6, 2))
    check_step(model, features(), 2, [1, 1])
    GPipe(model, [1, 1])(features()).sum().backward()
    assert model[0].unused.weight.grad is None


CHANGES: dict[str, Callable[[GPipe], object]] = {
    "frozen": lambda p: p[1].requires_grad_(False),
    "all frozen but the last": lambda p: [layer.requires_grad_(False) for layer in list(p)[:-1]],
    "parameter replaced": lambda p: setattr(p[1], "weight", nn.Parameter(torch.ones(8, 6))),
    "data replaced": lambda p: setattr(p[1].weight, "data", torch.ones(8, 6)),
    "other shape": lambda p: (setattr(p[1], "out_features", 8), setattr(p[1], "bias", None)),
    "dropout.p": lambda p: setattr(p[2], "p", 0.9),
    "eval of a layer": lambda p: p[2].eval(),
    "layer replaced": lambda p: setattr(p, "3", nn.Tanh()),
}


@pytest.mark.smoke
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_between_calls_takes_effect(change: Callable[[GPipe], object]) -> None:
    """Contract 5: nothing stale."""
    pipe, x = GPipe(noisy(), [2, 4], chunks=4), features()
    before = pipeline_step(pipe, x)
    change(pipe)
    expected = loop_step(nn.Sequential(*pipe), x, 4)
    after = pipeline_step(pipe, x)
    assert unequal(after, expected) == []
    assert after.keys() != before.keys() or unequal(after, before) != []


def test_batch_sizes_may_change_between_calls() -> None:
    model = mlp()
    pipe = GPipe(model, [2, 3], chunks=3)
    for size in (8, 3, 8, 1, 5):
        x = features(size)
        assert unequal(pipeline_step(pipe, x), loop_step(model, x, 3)) == []


@pytest.mark.smoke
@every_model
def test_five_training_steps_equal_the_plain_loop(make: Model, batch: Batch) -> None:
    """Compares parameters, buffers and the moments of AdamW."""
    states = []
    for pipelined in (False, True):
        model, x = make(), batch(7)
        forward = GPipe(model, uneven_balance(len(model), 2), chunks=3) if pipelined else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            output = pipeline(forward, x) if isinstance(forward, GPipe) else plain_loop(model, x, 3)
            output.square().mean().backward()
            optimizer.step()
        moments = [v for state in optimizer.state.values() for v in state.values()]
        states.append([*model.state_dict().values(), *moments])
    assert all(map(torch.equal, *states))


def test_fuse_may_be_set_between_calls() -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2)), fuse=False)
    x = torch.ones(2, 2)
    expected = pipe(x)
    for fuse in (True, True, False):
        pipe.fuse = fuse
        assert pipe.fuse == fuse
        assert all(stage.options.fuse == fuse for stage in stages_of(pipe))
        assert torch.equal(pipe(x), expected)

"""`GPipe.prepare` does all the work of a first call, and nothing else."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, replicate
from tests.internals import compiler_of, num_plans
from tests.reference import loop_step, pipeline_step, unequal
from tests.untraceable import FunctionLayer, branch_on_data

pytestmark = pytest.mark.usefixtures("one_thread")


def pipe(**options: Any) -> GPipe:
    torch.manual_seed(0)
    normed = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4), nn.Tanh())
    return GPipe(normed, **{"balance": [3, 2], "chunks": 2, **options})


def features(batch: int = 8) -> Tensor:
    return torch.randn(batch, 6, generator=torch.Generator().manual_seed(batch))


def work_done(model: GPipe) -> tuple[int, int, int]:
    """Returns the number of traces, of graphs written out from a template, and of plans."""
    compiler = compiler_of(model)
    return compiler.num_traces, compiler.num_instantiated, num_plans(model)


def assert_prepared(model: GPipe, *batches: Tensor, chunks: int = 2) -> None:
    """Asserts that steps with these mini-batches equal the plain loop's, and trace and plan nothing."""
    before = work_done(model)
    assert before[0] > 0
    for x in batches:
        expected = loop_step(nn.Sequential(*model), x, chunks, input_gradient=x.requires_grad)
        assert unequal(pipeline_step(model, x, input_gradient=x.requires_grad), expected) == []
    assert work_done(model) == before


def test_a_prepared_step_traces_nothing() -> None:
    """Neither with nor without the gradient of its input, in any checkpoint mode, nor does inference."""
    for checkpoint in ("always", "except_last", "never"):
        model, x = pipe(checkpoint=checkpoint), features().requires_grad_(checkpoint == "always")
        model.prepare(x)
        assert_prepared(model, x)
        with torch.no_grad():
            model.eval().prepare(x)
            before = work_done(model)
            assert torch.equal(model(x), torch.cat([nn.Sequential(*model)(part) for part in x.chunk(2)]))
        assert work_done(model) == before


def test_a_call_under_autocast_is_prepared_under_autocast() -> None:
    model = pipe()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.prepare(features())
        before = work_done(model)
        model(features()).float().square().mean().backward()
        assert work_done(model) == before
    model(features())
    assert work_done(model) != before


def test_several_shapes_are_prepared_by_one_call_or_by_several() -> None:
    """The third shape is enough for a template, which serves all others."""
    together, apart = pipe(), pipe()
    together.prepare(features(8), also=[features(6), features(10), features(14)])
    for batch in (8, 6, 10, 14):
        apart.prepare(features(batch))
    assert work_done(together) == work_done(apart)
    for model in (together, apart):
        assert_prepared(model, *map(features, (8, 6, 10, 14)))
    traces, *_ = work_done(together)
    together(features(12))
    assert work_done(together)[0] == traces


def test_meta_tensors_describe_a_call() -> None:
    """Strides, dtypes and ``requires_grad`` count, as those of the tensors that they stand for."""
    model = pipe()
    described = torch.empty(6, 8, device="meta").t().requires_grad_()
    model.prepare(described, also=[torch.empty(1, 6, device="meta").expand(8, 6)])
    assert_prepared(model, torch.randn(6, 8).t().requires_grad_(), torch.randn(1, 6).expand(8, 6))


class Scaled(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor, *, scale: float = 1.0) -> Tensor:
        return super().forward(x) * mask * scale


def test_all_arguments_of_a_call_are_described() -> None:
    """A tuple contains the positional arguments of a further call; keyword arguments hold for each."""
    model = GPipe(nn.Sequential(Scaled(6, 4), nn.Linear(4, 2)), [1, 1], chunks=2)
    mask = replicate(torch.ones(4))
    further = features(6), replicate(torch.empty(4, device="meta"))
    model.prepare(features(8), mask, also=[further], scale=0.5)
    before = work_done(model)
    for batch in (8, 6):
        model(features(batch), mask, scale=0.5)
    assert work_done(model) == before


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_no_state_changes(backend: str) -> None:
    model = pipe(backend=backend)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    objects = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    random_state = torch.get_rng_state()
    model.prepare(features(), also=[features(6), features(10)])
    assert torch.equal(torch.get_rng_state(), random_state)
    assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == objects
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_pending_balance_is_measured() -> None:
    """On zeros in place of meta tensors, which are valid indices of an embedding."""
    torch.manual_seed(0)
    big = nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model = GPipe(big, devices=["cpu", "cpu"], chunks=8)
    tokens = torch.randint(4, (8, 3))
    random_state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.prepare(tokens.to("meta"))
    assert torch.equal(torch.get_rng_state(), random_state)
    balance = model.balance
    assert_prepared(model, tokens, chunks=8)
    assert model.balance == balance


def test_a_layer_that_runs_in_python_is_named() -> None:
    """The warning of the call, which knows that the layer works, follows as without `prepare`."""
    torch.manual_seed(0)
    branch = FunctionLayer(branch_on_data)
    model, x = GPipe(nn.Sequential(nn.Linear(6, 8), branch, nn.Linear(8, 4)), [2, 1], chunks=8), features()
    with pytest.warns(UserWarning, match=r"stage 0, layer 1 \(FunctionLayer\) cannot be traced") as caught:
        model.prepare(x)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(UserWarning, match=r"layer 1 \(FunctionLayer\) runs in Python"):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.prepare(x)
        assert unequal(pipeline_step(model, x), loop_step(nn.Sequential(*model), x, 8)) == []
    model = GPipe(nn.Sequential(nn.Linear(6, 8), branch), [1, 1], chunks=8, backend="aten")
    with pytest.raises(RuntimeError, match=r"layer 1 \(FunctionLayer\) cannot be traced faithfully"):
        model.prepare(x)


def test_invalid_arguments_raise_as_in_a_call() -> None:
    model = pipe()
    with pytest.raises(ValueError, match="same batch size"):
        GPipe(nn.Sequential(Scaled(6, 4)), [1]).prepare(features(8), torch.ones(4, 4))
    with pytest.raises(TypeError, match="got no argument"):
        model.prepare()
    with pytest.raises(RuntimeError, match=r"torch\.func\.vmap cannot look into a GPipe"):
        torch.func.vmap(model.prepare)(torch.ones(2, 8, 6))
    assert work_done(model) == (0, 0, 0)
    GPipe(nn.Sequential(), []).prepare(features())


def test_a_warning_says_if_another_thread_runs_layers() -> None:
    """Layers are not traced while they run in Python."""
    running, ready = threading.Event(), threading.Event()

    def wait(held: nn.Module, x: Tensor) -> Tensor:
        running.set()
        assert ready.wait(60)
        return x

    def call() -> None:
        with pytest.warns(UserWarning, match="runs in Python"):
            model.eval()(features())

    model = GPipe(nn.Sequential(nn.Linear(6, 6), FunctionLayer(wait)), [2], chunks=1)
    thread = threading.Thread(target=call)
    thread.start()
    assert running.wait(60)
    try:
        with pytest.warns(UserWarning, match="another thread runs layers of the model; wait until"):
            model.prepare(features(6))
    finally:
        ready.set()
        thread.join()

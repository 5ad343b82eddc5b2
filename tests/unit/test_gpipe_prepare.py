"""`GPipe.prepare` does all the work of a first call, and nothing else."""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, replicate
from tests.internals import compiler_of, num_plans
from tests.reference import loop_step, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    )


def pipe(**options: Any) -> GPipe:
    return GPipe(layers(), **{"balance": [3, 3], "chunks": 2, **options})


def features(batch: int = 8) -> Tensor:
    return torch.randn(batch, 6, generator=torch.Generator().manual_seed(batch))


def work_done(model: GPipe) -> tuple[int, int, int]:
    """Returns the number of traces, of graphs written out from a template, and of plans."""
    compiler = compiler_of(model)
    return compiler.num_traces, compiler.num_instantiated, num_plans(model)


def assert_prepared(model: GPipe, *batches: Tensor) -> None:
    """Asserts that steps with these mini-batches equal the plain loop's, and trace and plan nothing."""
    before = work_done(model)
    assert before[0] > 0
    for x in batches:
        expected = loop_step(nn.Sequential(*model), x, 2, input_gradient=x.requires_grad)
        assert unequal(pipeline_step(model, x, input_gradient=x.requires_grad), expected) == []
    assert work_done(model) == before


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_a_prepared_step_traces_nothing(checkpoint: str) -> None:
    model = pipe(checkpoint=checkpoint)
    model.prepare(features())
    assert_prepared(model, features())


def test_a_prepared_step_computes_the_gradient_of_its_input() -> None:
    model, x = pipe(), features().requires_grad_()
    model.prepare(x)
    assert_prepared(model, x)


@pytest.mark.parametrize("context", [torch.no_grad, contextlib.nullcontext])
def test_a_prepared_inference_traces_nothing(context: Any) -> None:
    model = pipe().eval()
    with context():
        model.prepare(features())
        before = work_done(model)
        expected = torch.cat([nn.Sequential(*model)(part) for part in features().chunk(2)])
        assert torch.equal(model(features()), expected)
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


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor, mask: Tensor, *, scale: float = 1.0) -> Tensor:
        y: Tensor = self.linear(x) * mask * scale
        return y


def test_all_arguments_of_a_call_are_described() -> None:
    """A tuple contains the positional arguments of a further call; keyword arguments hold for each."""
    model = GPipe(nn.Sequential(Scaled(), nn.Linear(4, 2)), [1, 1], chunks=2)
    mask = replicate(torch.ones(4))
    model.prepare(
        features(8), mask, also=[(features(6), replicate(torch.empty(4, device="meta")))], scale=0.5
    )
    before = work_done(model)
    for batch in (8, 6):
        model(features(batch), mask, scale=0.5)
    assert work_done(model) == before


@pytest.mark.parametrize("also", [features(), {"x": features()}, "x", 3])
def test_further_mini_batches_must_be_in_a_list(also: Any) -> None:
    with pytest.raises(
        TypeError, match=r"also must be a list or tuple of further mini-batches, got .*also=\[x"
    ):
        pipe().prepare(features(), also=also)


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_no_state_changes(backend: str) -> None:
    model = pipe(backend=backend)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    objects = {name: id(p) for name, p in (*model.named_parameters(), *model.named_buffers())}
    random_state = torch.get_rng_state()
    model.prepare(features(), also=[features(6), features(10)])
    assert torch.equal(torch.get_rng_state(), random_state)
    assert {name: id(p) for name, p in (*model.named_parameters(), *model.named_buffers())} == objects
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_pending_balance_is_measured(on_meta: bool) -> None:
    """On zeros in place of meta tensors, which are valid indices of an embedding."""
    torch.manual_seed(0)
    big = nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model = GPipe(big, devices=["cpu", "cpu"], chunks=2)
    tokens = torch.randint(4, (8, 3))
    random_state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*idle for up to")
        model.prepare(tokens.to("meta") if on_meta else tokens)
    assert torch.equal(torch.get_rng_state(), random_state)
    balance = model.balance
    assert_prepared(model, tokens)
    assert model.balance == balance


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if y.sum() > 0 else -y


def python_pipe() -> GPipe:
    torch.manual_seed(0)
    return GPipe(nn.Sequential(nn.Linear(6, 8), Branch(), nn.Linear(8, 4)), [2, 1], chunks=8)


def test_a_layer_that_runs_in_python_is_named() -> None:
    """The warning of the call, which knows that the layer works, follows as without `prepare`."""
    model, x = python_pipe(), features()
    reason = r"stage 0, layer 1 \(Branch\) cannot be traced faithfully: PyTorch cannot trace it"
    with pytest.warns(UserWarning, match=reason) as caught:
        model.prepare(x)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(UserWarning, match=r"layer 1 \(Branch\) runs in Python: PyTorch cannot") as caught:
        model(x)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.prepare(x)
        assert unequal(pipeline_step(model, x), loop_step(nn.Sequential(*model), x, 8)) == []


def test_a_layer_that_may_not_run_in_python_raises() -> None:
    model = GPipe(nn.Sequential(nn.Linear(6, 8), Branch()), [1, 1], chunks=8, backend="aten")
    with pytest.raises(RuntimeError, match=r"layer 1 \(Branch\) cannot be traced faithfully"):
        model.prepare(features())


def test_invalid_arguments_raise_as_in_a_call() -> None:
    model = pipe()
    with pytest.raises(ValueError, match="same batch size"):
        GPipe(nn.Sequential(Scaled()), [1]).prepare(features(8), torch.ones(4, 4))
    with pytest.raises(TypeError, match="got no argument"):
        model.prepare()
    with pytest.raises(TypeError, match=r"dense, strided tensors, got a tensor of layout torch\.sparse_coo"):
        model.prepare(torch.empty(8, 6, device="meta", layout=torch.sparse_coo))
    with pytest.raises(RuntimeError, match=r"torch\.func\.vmap cannot look into a GPipe"):
        torch.func.vmap(model.prepare)(torch.ones(2, 8, 6))
    assert work_done(model) == (0, 0, 0)


def test_a_warning_says_if_another_thread_runs_layers() -> None:
    """Layers are not traced while they run in Python."""
    running, ready = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            running.set()
            assert ready.wait(60)
            return x

    def call() -> None:
        with pytest.warns(UserWarning, match="runs in Python"):
            model.eval()(features())

    model = GPipe(nn.Sequential(nn.Linear(6, 6), Waits()), [2], chunks=1)
    thread = threading.Thread(target=call)
    thread.start()
    assert running.wait(60)
    try:
        with pytest.warns(UserWarning, match="another thread runs layers of the model; wait until"):
            model.prepare(features(6))
    finally:
        ready.set()
        thread.join()


def test_a_pipeline_without_layers_has_nothing_to_prepare() -> None:
    GPipe(nn.Sequential(), []).prepare(features())


def test_a_hook_on_all_modules_is_not_traced() -> None:
    """Under such a hook, all layers run in Python."""
    model, seen = pipe(), []
    hook = nn.modules.module.register_module_forward_hook(lambda *arguments: seen.append(arguments))
    try:
        with pytest.warns(UserWarning, match="all layers run in Python while the global module hook"):
            model.prepare(features())
    finally:
        hook.remove()
    assert not seen
    assert work_done(model) == (0, 0, 0)
    model.prepare(features())
    assert_prepared(model, features())

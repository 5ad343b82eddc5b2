"""PyTorch features around a call: they work as around the plain loop, are refused, or cause one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules import module as modules
from torch.overrides import BaseTorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import BaseTorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from gpipe_fast import GPipe, keyed_rng, unsupported
from tests.models import features, mlp, noisy
from tests.reference import leaf, loop_step, pipeline_step, unequal
from tests.untraceable import segments_by_stage

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def forget_issued_warnings() -> Iterator[None]:
    with mock.patch.object(unsupported, "_warned", set()):
        yield


def small(**options: Any) -> GPipe:
    return GPipe(mlp(), [2, 3], chunks=4, **options)


# Global module hooks


def halve(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
    return output / 2 if isinstance(module, nn.Linear) else None


def double(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
    return (inputs[0] * 2,) if isinstance(module, nn.Tanh) else None


def negate(module: nn.Module, gradients: Any, outputs: Any) -> tuple[Tensor] | None:
    return (-gradients[0],) if isinstance(module, nn.Tanh) else None


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("register", "hook"),
    [
        (modules.register_module_forward_hook, halve),
        (modules.register_module_forward_pre_hook, double),
        (modules.register_module_full_backward_hook, negate),
    ],
)
def test_a_global_module_hook_takes_effect_while_it_is_registered(
    register: Callable[..., Any], hook: Callable[..., Any]
) -> None:
    """The hook may come before or after the first call; after its removal, layers run natively again."""
    x, early, late = features(), small(), small()
    without = pipeline_step(late, x)
    handle = register(hook)
    try:
        expected = loop_step(mlp(), x, 4)
        for pipe in (early, late):
            message = f"while the global module hook {hook.__name__} is registered"
            with pytest.warns(UserWarning, match=message):
                assert unequal(pipeline_step(pipe, x), expected) == []
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert unequal(pipeline_step(pipe, x), expected) == []
        assert unequal(expected, without) != []
    finally:
        handle.remove()
    for pipe in (early, late):
        assert unequal(pipeline_step(pipe, x), without) == []
        assert segments_by_stage(pipe) == [[(0, 2, True)], [(0, 3, True)]]  # lowered


# Observers that see nothing of a pipeline


@pytest.mark.smoke
def test_an_observer_that_sees_nothing_is_warned_about_once() -> None:
    """Programs are traced without the observer: calls give equal results, and layers stay native."""
    x = features()
    expected = loop_step(noisy(), x, 4)
    pipe = GPipe(noisy(), [2, 4], chunks=4, backend="aten")
    for make_observer, subject in (
        (lambda: FlopCounterMode(display=False), "FlopCounterMode sees"),
        (BaseTorchDispatchMode, "BaseTorchDispatchMode sees"),
        (BaseTorchFunctionMode, "BaseTorchFunctionMode sees"),
        (save_on_cpu, r"saved_tensors_hooks \(such as save_on_cpu\) see"),
    ):
        message = f"^{subject} nothing of a GPipe, whose layers run"
        with make_observer(), pytest.warns(UserWarning, match=message) as caught:
            pipe(x)
        assert [warning.filename for warning in caught] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with make_observer():
                assert unequal(pipeline_step(pipe, x), expected) == []
            assert unequal(pipeline_step(pipe, x), expected) == []


def test_harmless_contexts_cause_no_warning() -> None:
    x, pipe, model = features(), GPipe(noisy(), [2, 4], chunks=8), noisy()
    nested = GPipe(nn.Sequential(mlp(), nn.Sequential(nn.Tanh())), devices=["cpu"] * 2, chunks=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # PyTorch's own
        with forward_ad.dual_level():  # without tangents
            pipe(x)
        with torch.device("cpu"):
            pipe(x).sum().backward()  # the gradient's layout leads to a new trace
        with keyed_rng(model):
            pipe(x)
        with profile():
            pipe(x)
        nested(x)  # its layers are measured under modes of this library


# Transforms that would give wrong results


def with_a_dual_parameter(pipe: GPipe, x: Tensor) -> Any:
    with forward_ad.dual_level():
        weight = pipe[0].weight
        del pipe[0].weight
        pipe[0].weight = forward_ad.make_dual(weight.detach(), torch.ones_like(weight))
        return pipe(x)


def within_fake_mode(pipe: GPipe, x: Tensor) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return pipe(x)


REFUSED: dict[str, Callable[[GPipe, Tensor], Any]] = {
    "torch.func.vmap": lambda pipe, x: torch.func.vmap(pipe)(x.expand(3, 8, 6)),
    "torch.func.grad": lambda pipe, x: torch.func.grad(lambda y: pipe(y).sum())(x),
    "torch.func.jvp": lambda pipe, x: torch.func.jvp(pipe, (x,), (x,)),
    "forward-mode AD": lambda pipe, x: forward_ad.dual_level()(lambda: pipe(forward_ad.make_dual(x, x)))(),
    "torch.jit.trace": lambda pipe, x: torch.jit.trace(pipe, (x,)),
    "torch.jit.script": lambda pipe, x: torch.jit.script(pipe),
    "torch.export": lambda pipe, x: torch.export.export(pipe, (x,), strict=False),
    "ProxyTorchDispatchMode": lambda pipe, x: make_fx(pipe)(x),
    "FakeTensorMode": lambda pipe, x: pipe(FakeTensorMode().from_tensor(x)),
    "FakeTensorMode ": within_fake_mode,
    "forward-mode AD .its tangents": with_a_dual_parameter,  # which the pipeline keeps
}


@pytest.mark.smoke
def test_tracers_and_transforms_are_refused() -> None:
    """The next call works."""
    pipe, x = small(), features()
    expected = torch.cat([mlp()(c) for c in x.chunk(4)])
    # In PyTorch 2.11 a failing export leaves its hook on every module.
    hooks = mock.patch.dict(modules._global_buffer_registration_hooks)
    with warnings.catch_warnings(), hooks:
        warnings.simplefilter("ignore", DeprecationWarning)
        for name, transform in REFUSED.items():
            assert torch.equal(pipe(x), expected)
            message = rf"{name}.*cannot look into a GPipe, .*; apply it to the plain .*nn.Sequential"
            with pytest.raises(RuntimeError, match=message):
                transform(pipe, x)


def test_batched_gradients_are_refused() -> None:
    """A plain backward afterwards works."""
    pipe, x = small(), features().requires_grad_()
    y = pipe(x)
    with pytest.raises(RuntimeError, match=r"vmap \(is_grads_batched=True, .*\) cannot look into a GPipe"):
        torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True, retain_graph=True)
    y.sum().backward()
    assert x.grad is not None


def test_a_pipeline_within_a_pipeline_runs_in_python() -> None:
    x, inner = features(), small()
    outer = GPipe(nn.Sequential(nn.Linear(6, 6), inner), [1, 1], chunks=2)
    with pytest.warns(UserWarning, match=r"layer 1 \(GPipe\) runs in Python"):
        y = outer(x)
    plain = nn.Sequential(*inner)
    assert torch.equal(y, torch.cat([plain(d) for c in x.chunk(2) for d in outer[0](c).chunk(4)]))


def test_functional_call_substitutes_parameters() -> None:
    """The gradients equal the plain loop's, and the module's own parameters are unchanged."""
    pipe, x = small(backend="aten"), features()
    plain = nn.Sequential(*pipe)
    before = pipe(x)
    call = torch.func.functional_call
    found = []
    for forward in (
        lambda tensors: call(pipe, tensors, (x,)),
        lambda tensors: torch.cat([call(plain, tensors, (c,)) for c in x.chunk(4)]),
    ):
        leaves = {name: leaf(p.detach() + 1) for name, p in pipe.named_parameters()}
        y = forward({name: tensor * 2 for name, tensor in leaves.items()})
        y.square().mean().backward()
        found.append([y, *(tensor.grad for tensor in leaves.values())])
    assert all(map(torch.equal, *found))
    assert torch.equal(pipe(x), before)

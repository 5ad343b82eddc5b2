"""PyTorch features around a call: they work as around the plain loop, are refused, or cause one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
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
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from gpipe_fast import GPipe, keyed_rng, unsupported
from tests.models import features, mlp, noisy
from tests.reference import leaf, loop_step, pipeline_step, plain_loop, unequal
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


HOOKS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "halve": (modules.register_module_forward_hook, halve),
    "double": (modules.register_module_forward_pre_hook, double),
    "negate": (modules.register_module_full_backward_hook, negate),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", HOOKS)
def test_a_global_module_hook_takes_effect_while_it_is_registered(name: str) -> None:
    """The hook may come before or after the first call; after its removal, layers run natively again."""
    register, hook = HOOKS[name]
    x, early, late = features(), small(), small()
    without = pipeline_step(late, x)
    handle = register(hook)
    try:
        expected = loop_step(mlp(), x, 4)
        for pipe in (early, late):
            with pytest.warns(UserWarning, match=f"while the global module hook {name} is registered"):
                assert unequal(pipeline_step(pipe, x), expected) == []
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert unequal(pipeline_step(pipe, x), expected) == []
        assert unequal(expected, without) != []
        with pytest.raises(RuntimeError, match=f"hook {name} needs layers in Python, and backend='aten'"):
            small(backend="aten")(x)
    finally:
        handle.remove()
    for pipe in (early, late):
        assert unequal(pipeline_step(pipe, x), without) == []
        assert segments_by_stage(pipe) == [[(0, 2, True)], [(0, 3, True)]]  # lowered


# Observers that see nothing of a pipeline


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


BLIND_OBSERVERS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "flops": (lambda: FlopCounterMode(display=False), "FlopCounterMode sees"),
    "dispatch": (Dispatched, "Dispatched sees"),
    "function": (Called, "Called sees"),
    "saved": (save_on_cpu, r"saved_tensors_hooks \(such as save_on_cpu\) see"),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", BLIND_OBSERVERS)
def test_an_observer_that_sees_nothing_is_warned_about_once(name: str) -> None:
    """Programs are traced without the observer: calls give equal results, and layers stay native."""
    make_observer, subject = BLIND_OBSERVERS[name]
    x, pipe = features(), GPipe(noisy(), [2, 4], chunks=4, backend="aten")
    expected = loop_step(noisy(), x, 4)
    with (
        make_observer(),
        pytest.warns(UserWarning, match=f"^{subject} nothing of a GPipe, whose layers run") as caught,
    ):
        pipe(x)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with make_observer():
            assert unequal(pipeline_step(pipe, x), expected) == []
            pipeline_step(small(), x)
        assert unequal(pipeline_step(pipe, x), expected) == []


def test_harmless_contexts_cause_no_warning() -> None:
    x, pipe, model = features(), GPipe(noisy(), [2, 4], chunks=8), noisy()
    nested = GPipe(nn.Sequential(mlp(), nn.Sequential(nn.Tanh())), devices=["cpu"] * 2, chunks=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # PyTorch's own
        with torch.device("cpu"):
            pipe(x).sum().backward()  # the gradient's layout leads to a new trace
        with keyed_rng(model):
            pipe(x)
        with profile():
            pipe(x)
        nested(x)  # its layers are measured under modes of this library


# Transforms that would give wrong results


def under_a_dual_level(pipe: GPipe, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return pipe(forward_ad.make_dual(x, x))


def with_a_dual_parameter(pipe: GPipe, x: Tensor) -> Any:
    with forward_ad.dual_level():
        weight = pipe[0].weight
        del pipe[0].weight
        pipe[0].weight = forward_ad.make_dual(weight.detach(), torch.ones_like(weight))
        return pipe(x)


def with_a_fake_input(pipe: GPipe, x: Tensor) -> Any:
    return pipe(FakeTensorMode().from_tensor(x))


def within_fake_mode(pipe: GPipe, x: Tensor) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return pipe(x)


REFUSED: dict[str, Callable[[GPipe, Tensor], Any]] = {
    "torch.func.vmap": lambda pipe, x: torch.func.vmap(pipe)(x.expand(3, 8, 6)),
    "torch.func.grad": lambda pipe, x: torch.func.grad(lambda y: pipe(y).sum())(x),
    "torch.func.jvp": lambda pipe, x: torch.func.jvp(pipe, (x,), (x,)),
    "forward-mode AD": under_a_dual_level,
    "forward-mode AD .its tangents": with_a_dual_parameter,
    "torch.jit.trace": lambda pipe, x: torch.jit.trace(pipe, (x,)),
    "torch.jit.script": lambda pipe, x: torch.jit.script(pipe),
    "torch.export": lambda pipe, x: torch.export.export(pipe, (x,), strict=False),
    "ProxyTorchDispatchMode": lambda pipe, x: make_fx(pipe)(x),
    "FakeTensorMode": with_a_fake_input,
    "FakeTensorMode ": within_fake_mode,
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", REFUSED)
def test_tracers_and_transforms_are_refused(name: str) -> None:
    """The next call works."""
    pipe, x = small(), features()
    expected = torch.cat([mlp()(c) for c in x.chunk(4)])
    message = (
        rf"{name}.*cannot look into a GPipe, .*; apply it to the plain Sequential .*nn.Sequential\(\*model\)"
    )
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match=message):
        warnings.simplefilter("ignore", DeprecationWarning)
        REFUSED[name](pipe, x)
    if name != "forward-mode AD .its tangents":
        assert torch.equal(pipe(x), expected)


def test_batched_gradients_are_refused() -> None:
    """A plain backward afterwards works."""
    pipe, x = small(), features().requires_grad_()
    y = pipe(x)
    with pytest.raises(RuntimeError, match=r"vmap \(is_grads_batched=True, .*\) cannot look into a GPipe"):
        torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True, retain_graph=True)
    y.sum().backward()
    assert x.grad is not None


def test_a_dual_level_without_tangents_is_allowed() -> None:
    pipe, x = small(), features()
    with forward_ad.dual_level():
        assert torch.equal(pipe(x), plain_loop(mlp(), x, 4))


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
    found = []
    for forward in (
        lambda tensors: torch.func.functional_call(pipe, tensors, (x,)),
        lambda tensors: torch.cat([torch.func.functional_call(plain, tensors, (c,)) for c in x.chunk(4)]),
    ):
        leaves = {name: leaf(p.detach() + 1) for name, p in pipe.named_parameters()}
        y = forward({name: tensor * 2 for name, tensor in leaves.items()})
        y.square().mean().backward()
        found.append([y, *(tensor.grad for tensor in leaves.values())])
    assert all(map(torch.equal, *found))
    assert torch.equal(pipe(x), before)

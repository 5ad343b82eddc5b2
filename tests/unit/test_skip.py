"""Skip connections outside of pipelines, which behave as in torchgpipe."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipe_fast.skip
from gpipe_fast.skip import Namespace, Skippable, pop, skippable, skips_of, stash, verify_skippables

torchgpipe_skip = pytest.importorskip("torchgpipe.skip")
BOTH_APIS = pytest.mark.parametrize(
    "api", [gpipe_fast.skip, torchgpipe_skip], ids=["gpipe_fast", "torchgpipe"]
)


@skippable(stash=["a"])
class Stash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        yield stash("a", x)
        return self.linear(x)


@skippable(pop=["a"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("a"))


def layer(api: Any, *commands: str, **declared: list[str]) -> nn.Module:
    """Returns a module that stashes twice its input, or None, and adds what it pops, as ``commands`` say."""

    class Yielding(nn.Module):
        def forward(self, x: Tensor) -> Any:
            doubled = x * 2
            for command in commands:
                verb, name = command.split()
                if verb == "pop":
                    popped = yield api.pop(name)
                    x = x if popped is None else x + popped
                else:
                    yield api.stash(name, doubled if verb == "stash" else None)
            return x

    module: nn.Module = api.skippable(**declared)(Yielding)()
    return module


@BOTH_APIS
def test_stashed_tensors_are_popped(api: Any) -> None:
    x = torch.randn(2, 3)
    model = nn.Sequential(
        layer(api, "stash s", "stash t", "none n", stash=["s", "t", "n"]),
        nn.Tanh(),
        layer(api, "pop s", pop=["s"]),
        layer(api, "pop t", "pop n", pop=["t", "n"]),
    )
    for _ in range(2):
        assert torch.equal(model(x), x.tanh() + x * 2 + x * 2)


@BOTH_APIS
def test_verify_skippables_lists_every_mismatch(api: Any) -> None:
    def layers(*declared: dict[str, list[str]]) -> nn.Module:
        return nn.Sequential(*(layer(api, **each) for each in declared))

    stashes, pops = {"stash": ["a"]}, {"pop": ["a"]}
    api.verify_skippables(layers(stashes, {}, pops))
    others = {"pop": ["c"]}, {"stash": ["d"]}
    with pytest.raises(TypeError) as caught:
        api.verify_skippables(layers(stashes, stashes, {"stash": ["b"], "pop": ["b"]}, pops, pops, *others))
    first, *faults = str(caught.value).splitlines()
    assert first == "one or more pairs of stash and pop do not match:"
    assert faults == [
        "",
        "* '1' redeclared 'a' as stashable but not isolated by namespace",
        "* '2' declared 'b' both as stashable and as poppable",
        "* '4' redeclared 'a' as poppable but not isolated by namespace",
        "* '5' declared 'c' as poppable but it was not stashed",
        "* no module declared 'd' as poppable but stashed",
    ]


@BOTH_APIS
def test_namespaces_keep_equal_names_apart(api: Any) -> None:
    inner, outer = api.Namespace(), api.Namespace()

    first, second = (layer(api, "stash a", stash=["a"]) for _ in range(2))
    assert first.isolate(outer) is first
    model = nn.Sequential(
        *(first, nn.Tanh(), second.isolate(inner, only=["a"])),
        *(layer(api, "pop a", pop=["a"]).isolate(namespace) for namespace in (inner, outer)),
    )
    api.verify_skippables(model)
    x = torch.randn(2, 3)
    assert torch.equal(model(x), x.tanh() + x.tanh() * 2 + x * 2)


@BOTH_APIS
def test_copies_of_a_namespace_are_equal_and_other_namespaces_differ(api: Any) -> None:
    a, b = api.Namespace(), api.Namespace()
    assert a == copy.deepcopy(a) == pickle.loads(pickle.dumps(a))
    assert a != b
    assert len({a, b, copy.copy(a)}) == 2
    assert (a < b) != (b < a)


def test_copied_and_pickled_skip_connections_still_match() -> None:
    namespace, x = Namespace(), torch.randn(2, 3)
    model = nn.Sequential(Stash().isolate(namespace), Pop().isolate(namespace))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        verify_skippables(copied)
        assert torch.equal(copied(x), model(x))


def test_stashed_tensors_are_thread_local() -> None:
    Stash()(torch.ones(1, 3))
    with ThreadPoolExecutor() as pool, pytest.raises(RuntimeError, match="'a' has not been stashed"):
        pool.submit(Pop(), torch.ones(1, 3)).result()
    Pop()(torch.ones(1, 3))


def test_a_failed_layer_stashes_nothing() -> None:
    with pytest.raises(RuntimeError, match="'g' has not been declared as stashable"):
        layer(gpipe_fast.skip, "stash f", "stash g", stash=["f"])(torch.ones(1, 3))
    with pytest.raises(RuntimeError, match="'f' has not been stashed"):
        layer(gpipe_fast.skip, "pop f", pop=["f"])(torch.ones(1, 3))


def test_skips_of_lists_the_skip_connections_between_layers() -> None:
    """Skip connections within a layer are left out; those of nested modules belong to the enclosing layer."""
    a, b = Namespace(), Namespace()
    layers = [
        Stash().isolate(a),
        nn.Sequential(nn.ReLU(), Stash().isolate(b), Stash(), Pop()),
        Pop().isolate(b),
        Pop().isolate(a),
    ]
    verify_skippables(nn.Sequential(*layers))
    found = [(s.key, s.source, s.target, s.stash_order) for s in skips_of(layers)]
    assert found == [((b, "a"), 1, 2, 1), ((a, "a"), 0, 3, 0)]


def test_a_skippable_module_wraps_an_instance_of_its_class() -> None:
    layer = Stash()
    assert isinstance(layer, Stash)
    assert isinstance(layer, Skippable)
    assert repr(layer).startswith("@skippable(Stash(")
    assert list(layer.state_dict()) == ["module.linear.weight", "module.linear.bias"]
    assert (layer.stashable(), layer.poppable()) == ([(None, "a")], [])

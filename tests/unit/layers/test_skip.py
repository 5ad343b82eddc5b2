"""Skip connections outside of pipelines, as torchgpipe has them."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipe_fast.layers.skip
from gpipe_fast.layers.skip import Namespace, Skippable, pop, skippable, skips_of, stash, verify_skippables

torchgpipe_skip = pytest.importorskip("torchgpipe.skip")
BOTH = pytest.mark.parametrize("api", [gpipe_fast.skip, torchgpipe_skip], ids=["gpipe_fast", "torchgpipe"])


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


def yielding(api: Any, commands: Callable[..., Any], **declared: list[str]) -> nn.Module:
    """A module that yields what a generator function does."""

    class Yielding(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return commands(x)

    module: nn.Module = api.skippable(**declared)(Yielding)()
    return module


def stashing(api: Any, *names: str, returns: float = 1.0) -> Callable[[Tensor], Any]:
    def commands(x: Tensor) -> Any:
        for name in names:
            yield api.stash(name, x * 2)
        return x * returns

    return commands


def popping(api: Any, *names: str) -> Callable[[Tensor], Any]:
    def commands(x: Tensor) -> Any:
        for name in names:
            popped = yield api.pop(name)
            x = x if popped is None else x + popped
        return x

    return commands


def nothing(api: Any) -> Callable[[Tensor], Any]:
    return lambda x: x


def other(x: Tensor) -> Any:
    yield 42
    return x


def none(api: Any) -> Callable[[Tensor], Any]:
    def commands(x: Tensor) -> Any:
        yield api.stash("s", None)
        return x

    return commands


@BOTH
def test_what_is_stashed_is_popped(api: Any) -> None:
    x = torch.randn(2, 3)
    model = nn.Sequential(
        yielding(api, stashing(api, "s", "t"), stash=["s", "t"]),
        nn.Tanh(),
        yielding(api, popping(api, "s"), pop=["s"]),
        yielding(api, popping(api, "t"), pop=["t"]),
    )
    for _ in range(2):
        assert torch.equal(model(x), x.tanh() + x * 2 + x * 2)


@BOTH
def test_none_can_be_stashed(api: Any) -> None:
    x = torch.randn(2, 3)
    model = nn.Sequential(yielding(api, none(api), stash=["s"]), yielding(api, popping(api, "s"), pop=["s"]))
    assert torch.equal(model(x), x)


@BOTH
@pytest.mark.parametrize(
    ("message", "build"),
    [
        ("'s' has not been stashed", lambda api: yielding(api, popping(api, "s"), pop=["s"])),
        (
            "'t' has not been declared as stashable",
            lambda api: yielding(api, stashing(api, "s", "t"), stash=["s"]),
        ),
        (
            "'t' has not been declared as poppable",
            lambda api: nn.Sequential(
                yielding(api, stashing(api, "s"), stash=["s"]), yielding(api, popping(api, "t"), pop=["s"])
            ),
        ),
        ("'s' must be stashed but have not", lambda api: yielding(api, nothing(api), stash=["s"])),
        (
            "'s' must be popped but have not",
            lambda api: nn.Sequential(
                yielding(api, stashing(api, "s"), stash=["s"]), yielding(api, nothing(api), pop=["s"])
            ),
        ),
    ],
)
def test_broken_promises(api: Any, message: str, build: Callable[[Any], nn.Module]) -> None:
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        build(api)(torch.ones(1, 3))


@BOTH
def test_other_commands(api: Any) -> None:
    with pytest.raises(TypeError, match=r"^42 is not a command from @skippable$"):
        yielding(api, other)(torch.ones(1, 3))


def test_popping_twice_is_refused() -> None:
    model = nn.Sequential(Stash(), yielding(gpipe_fast.skip, popping(gpipe_fast.skip, "a", "a"), pop=["a"]))
    with pytest.raises(RuntimeError, match="'a' has been popped already"):
        model(torch.ones(1, 3))


@BOTH
def test_what_does_not_match_is_listed(api: Any) -> None:
    def s(**declared: list[str]) -> nn.Module:
        return yielding(api, nothing(api), **declared)

    api.verify_skippables(nn.Sequential(s(stash=["a"]), nn.ReLU(), s(pop=["a"])))
    with pytest.raises(TypeError) as caught:
        api.verify_skippables(
            nn.Sequential(
                s(stash=["a"]),
                s(stash=["a"]),
                s(stash=["b"], pop=["b"]),
                s(pop=["a"]),
                s(pop=["a"]),
                s(pop=["c"]),
                s(stash=["d"]),
            )
        )
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


@BOTH
def test_namespaces_keep_equal_names_apart(api: Any) -> None:
    inner, outer = api.Namespace(), api.Namespace()

    def s(factor: float) -> nn.Module:
        def commands(x: Tensor) -> Any:
            yield api.stash("a", x * factor)
            return x

        return yielding(api, commands, stash=["a"])

    first, second = s(2), s(3)
    assert first.isolate(outer) is first
    model = nn.Sequential(
        first,
        second.isolate(inner, only=["a"]),
        yielding(api, popping(api, "a"), pop=["a"]).isolate(inner),
        nn.Tanh(),
        yielding(api, popping(api, "a"), pop=["a"]).isolate(outer),
    )
    api.verify_skippables(model)
    x = torch.randn(2, 3)
    assert torch.equal(model(x), (x + x * 3).tanh() + x * 2)


@BOTH
def test_namespaces(api: Any) -> None:
    a, b = api.Namespace(), api.Namespace()
    assert a == copy.deepcopy(a) == pickle.loads(pickle.dumps(a))
    assert a != b
    assert len({a, b, copy.copy(a)}) == 2
    assert (a < b) != (b < a)


def test_isolating_what_is_not_declared() -> None:
    with pytest.raises(ValueError, match="cannot isolate 'b': the module declares 'a'"):
        Stash().isolate(Namespace(), only=["b"])


def test_decorated_classes() -> None:
    layer = Stash()
    assert isinstance(layer, Stash)
    assert isinstance(layer, Skippable)
    assert repr(layer).startswith("@skippable(Stash(")
    assert list(layer.state_dict()) == ["module.linear.weight", "module.linear.bias"]
    assert (layer.stashable(), layer.poppable()) == ([(None, "a")], [])


def test_copies_and_pickles() -> None:
    namespace, x = Namespace(), torch.randn(2, 3)
    model = nn.Sequential(Stash().isolate(namespace), Pop().isolate(namespace))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        verify_skippables(again)
        assert torch.equal(again(x), model(x))


def test_threads_do_not_see_each_other_s() -> None:
    Stash()(torch.ones(1, 3))
    try:
        raised: list[str] = []

        def run() -> None:
            try:
                Pop()(torch.ones(1, 3))
            except RuntimeError as error:
                raised.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert raised == ["'a' has not been stashed"]
    finally:
        Pop()(torch.ones(1, 3))


def test_a_failed_layer_stashes_nothing() -> None:
    def commands(x: Tensor) -> Any:
        yield stash("f", x)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        yielding(gpipe_fast.skip, commands, stash=["f"])(torch.ones(1, 3))
    with pytest.raises(RuntimeError, match="'f' has not been stashed"):
        yielding(gpipe_fast.skip, popping(gpipe_fast.skip, "f"), pop=["f"])(torch.ones(1, 3))


def test_skips_of_layers() -> None:
    """Those within a layer do not show, and deeper ones belong to their layer."""
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

"""What a constructor refuses, and in which order: as torchgpipe's, shown of both libraries."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from tests.torchgpipe.libraries import OURS, TORCHGPIPE, Library, both


class Fault:
    """One thing that is wrong with the arguments of a constructor, and the error that it makes."""

    def __init__(
        self, kind: type[Exception], message: str, spoil: Callable[[dict[str, Any]], object]
    ) -> None:
        self.kind, self.message, self.spoil = kind, message, spoil


def stash_alone(library: Library) -> nn.Module:
    class Stash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Any:
            yield library.skip.stash("s", x)
            return x

    made: nn.Module = library.skip.skippable(stash=["s"])(Stash)()
    return made


def shorten(arguments: dict[str, Any]) -> None:
    arguments["balance"] = [arguments["balance"][0], 1]


def repeat(arguments: dict[str, Any]) -> None:
    arguments["layers"][1] = arguments["layers"][0]


def tie(arguments: dict[str, Any]) -> None:
    first, *_, last = arguments["layers"]
    last.register_parameter("tied", next(first.parameters()))


# By the number in the contract; what spoils layers comes in the order in which it can be combined.
FAULTS = {
    1: Fault(ValueError, "balance is required", lambda a: a.update(balance=None)),
    2: Fault(ValueError, "number of chunks must be positive integer", lambda a: a.update(chunks=0)),
    3: Fault(
        ValueError,
        "checkpoint is not one of 'always', 'except_last', or 'never'",
        lambda a: a.update(checkpoint="no"),
    ),
    4: Fault(
        TypeError,
        "module must be nn.Sequential to be partitioned",
        lambda a: a.update(container=nn.ModuleList),
    ),
    7: Fault(
        TypeError,
        "one or more pairs of stash and pop do not match:",
        lambda a: a["layers"].__setitem__(0, stash_alone(a["library"])),
    ),
    5: Fault(ValueError, "module with duplicate children is not supported", repeat),
    6: Fault(ValueError, "module with duplicate parameters in distinct children is not supported", tie),
    9: Fault(
        ValueError,
        "all balance numbers must be positive integer (balance: [0, 3])",
        lambda a: a.update(balance=[0, 3]),
    ),
    8: Fault(
        ValueError,
        "module and sum of balance have different length (module: 3, sum of balance: 2)",
        shorten,
    ),
    10: Fault(
        IndexError,
        "too few devices to hold given partitions (devices: 1, partitions: 2)",
        lambda a: a.update(devices=["cpu"]),
    ),
}


def construct(library: Library, *faults: int, **more: Any) -> Any:
    arguments: dict[str, Any] = {
        "library": library,
        "layers": [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)],
        "container": lambda layers: nn.Sequential(*layers),
        **{"chunks": 2, "checkpoint": "always", "balance": [1, 2], "devices": ["cpu"] * 2},
    }
    for number, fault in FAULTS.items():
        # With no balance there is none that could be wrong.
        if number in faults and not (1 in faults and number in (8, 9)):
            fault.spoil(arguments)
    module = arguments.pop("container")(arguments.pop("layers"))
    return arguments.pop("library").make(module, **arguments, **more)


def message_of(library: Library, kind: type[Exception], *faults: int, **more: Any) -> str:
    with pytest.raises(kind) as raised:
        construct(library, *faults, **more)
    assert raised.type is kind
    return str(raised.value)


# Two of the checks are deliberately not ours.
CHECKS = {OURS: sorted(FAULTS.keys() - {1, 6}), TORCHGPIPE: sorted(FAULTS)}


@pytest.mark.parametrize("number", CHECKS[OURS])
def test_our_constructor_checks(number: int) -> None:
    """Messages begin as torchgpipe's; ours may help with something else then."""
    assert message_of(OURS, FAULTS[number].kind, number).startswith(FAULTS[number].message)


@pytest.mark.parametrize("number", CHECKS[TORCHGPIPE])
def test_torchgpipes_constructor_checks(number: int) -> None:
    assert message_of(TORCHGPIPE, FAULTS[number].kind, number).startswith(FAULTS[number].message)


@both
def test_a_constructor_checks_in_this_order(library: Library) -> None:
    """All pairs: of two faults the first in the contract is the one that comes out."""
    for first, second in itertools.combinations(CHECKS[library], 2):
        message = message_of(library, FAULTS[first].kind, first, second)
        start = FAULTS[first].message.partition(" (")[0]
        assert message.startswith(start), (first, second)


@pytest.mark.parametrize("number", CHECKS[OURS])
def test_checks_of_our_own_come_last(number: int) -> None:
    assert message_of(OURS, FAULTS[number].kind, number, backend="no").startswith(FAULTS[number].message)
    with pytest.raises(ValueError, match="backend is not one of"):
        construct(OURS, backend="no")

"""The constructor's argument checks and their order, which both libraries share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from tests.torchgpipe.libraries import OURS, TORCHGPIPE, Library, both_libraries


class Fault:
    """One invalid constructor argument, and the error that it causes."""

    def __init__(
        self, kind: type[Exception], message: str, apply: Callable[[dict[str, Any]], object]
    ) -> None:
        self.kind, self.message, self.apply = kind, message, apply


def unmatched_stash(library: Library) -> nn.Module:
    class Stash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Any:
            yield library.skip.stash("s", x)
            return x

    layer: nn.Module = library.skip.skippable(stash=["s"])(Stash)()
    return layer


def shorten_balance(arguments: dict[str, Any]) -> None:
    arguments["balance"] = [arguments["balance"][0], 1]


def duplicate_layer(arguments: dict[str, Any]) -> None:
    arguments["layers"][1] = arguments["layers"][0]


def share_parameter(arguments: dict[str, Any]) -> None:
    first, *_, last = arguments["layers"]
    last.register_parameter("tied", next(first.parameters()))


# By the check's number in the contract. Faults in the layers are listed in an order in which they combine.
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
        lambda a: a["layers"].__setitem__(0, unmatched_stash(a["library"])),
    ),
    5: Fault(ValueError, "module with duplicate children is not supported", duplicate_layer),
    6: Fault(
        ValueError, "module with duplicate parameters in distinct children is not supported", share_parameter
    ),
    9: Fault(
        ValueError,
        "all balance numbers must be positive integer (balance: [0, 3])",
        lambda a: a.update(balance=[0, 3]),
    ),
    8: Fault(
        ValueError,
        "module and sum of balance have different length (module: 3, sum of balance: 2)",
        shorten_balance,
    ),
    10: Fault(
        IndexError,
        "too few devices to hold given partitions (devices: 1, partitions: 2)",
        lambda a: a.update(devices=["cpu"]),
    ),
}


def construct_with(library: Library, *faults: int, **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "library": library,
        "layers": [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)],
        "container": lambda layers: nn.Sequential(*layers),
        **{"chunks": 2, "checkpoint": "always", "balance": [1, 2], "devices": ["cpu"] * 2},
    }
    for number, fault in FAULTS.items():
        # A balance that is None cannot also be wrong.
        if number in faults and not (1 in faults and number in (8, 9)):
            fault.apply(arguments)
    module = arguments.pop("container")(arguments.pop("layers"))
    return arguments.pop("library").make(module, **arguments, **options)


def error_message(library: Library, kind: type[Exception], *faults: int, **options: Any) -> str:
    with pytest.raises(kind) as raised:
        construct_with(library, *faults, **options)
    assert raised.type is kind
    return str(raised.value)


# gpipe_fast deliberately omits two of the checks.
CHECKED_FAULTS = {OURS: sorted(FAULTS.keys() - {1, 6}), TORCHGPIPE: sorted(FAULTS)}


@pytest.mark.parametrize("number", CHECKED_FAULTS[OURS])
def test_gpipe_fast_rejects_an_invalid_argument_with_torchgpipes_message(number: int) -> None:
    """Messages begin with torchgpipe's text; gpipe_fast may append help."""
    assert error_message(OURS, FAULTS[number].kind, number).startswith(FAULTS[number].message)


@pytest.mark.parametrize("number", CHECKED_FAULTS[TORCHGPIPE])
def test_torchgpipe_rejects_an_invalid_argument(number: int) -> None:
    assert error_message(TORCHGPIPE, FAULTS[number].kind, number).startswith(FAULTS[number].message)


@both_libraries
def test_of_two_invalid_arguments_the_first_in_the_contract_is_reported(library: Library) -> None:
    """Of every two faults, the one with the lower number in the contract is raised."""
    for first, second in itertools.combinations(CHECKED_FAULTS[library], 2):
        message = error_message(library, FAULTS[first].kind, first, second)
        start = FAULTS[first].message.partition(" (")[0]
        assert message.startswith(start), (first, second)


@pytest.mark.parametrize("number", CHECKED_FAULTS[OURS])
def test_checks_that_only_gpipe_fast_has_come_last(number: int) -> None:
    assert error_message(OURS, FAULTS[number].kind, number, backend="no").startswith(FAULTS[number].message)
    with pytest.raises(ValueError, match="backend is not one of"):
        construct_with(OURS, backend="no")

"""The constructor's argument checks and their order, which both libraries share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn

from tests.torchgpipe.libraries import OURS, TORCHGPIPE, Library, both_libraries


class Fault(NamedTuple):
    """One invalid constructor argument, and the error that it causes."""

    kind: type[Exception]
    message: str
    apply: Callable[[dict[str, Any]], object]


def unmatched_stash(library: Library) -> nn.Module:
    class Stash(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            yield library.skip.stash("s", x)
            return x

    layer: nn.Module = library.skip.skippable(stash=["s"])(Stash)(6, 6)
    return layer


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
    5: Fault(
        ValueError,
        "module with duplicate children is not supported",
        lambda a: a["layers"].__setitem__(1, a["layers"][0]),
    ),
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
        lambda a: a.update(balance=[a["balance"][0], 1]),
    ),
    10: Fault(
        IndexError,
        "too few devices to hold given partitions (devices: 1, partitions: 2)",
        lambda a: a.update(devices=["cpu"]),
    ),
}
# gpipe_fast deliberately omits two of the checks.
CHECKED_FAULTS = {OURS: sorted(FAULTS.keys() - {1, 6}), TORCHGPIPE: sorted(FAULTS)}


def error_message(library: Library, *faults: int, **options: Any) -> str:
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
    kind = FAULTS[faults[0]].kind if faults else ValueError
    with pytest.raises(kind) as raised:
        module = arguments.pop("container")(arguments.pop("layers"))
        arguments.pop("library").make(module, **arguments, **options)
    assert raised.type is kind
    return str(raised.value)


@both_libraries
def test_invalid_arguments_are_rejected_with_torchgpipes_message(library: Library) -> None:
    """Messages begin with torchgpipe's text; gpipe_fast may append help, and its own checks come last."""
    for number in CHECKED_FAULTS[library]:
        for options in ({}, {"backend": "no"}) if library is OURS else ({},):
            assert error_message(library, number, **options).startswith(FAULTS[number].message)
    if library is OURS:
        assert error_message(OURS, backend="no").startswith("backend is not one of")


@both_libraries
def test_of_two_invalid_arguments_the_first_in_the_contract_is_reported(library: Library) -> None:
    """Of every two faults, the one with the lower number in the contract is raised."""
    for first, second in itertools.combinations(CHECKED_FAULTS[library], 2):
        start = FAULTS[first].message.partition(" (")[0]
        assert error_message(library, first, second).startswith(start), (first, second)

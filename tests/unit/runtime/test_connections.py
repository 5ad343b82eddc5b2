"""Connections between stages: neighbours, skip connections, shared parameters, and their routes."""

from __future__ import annotations

import random
import warnings
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import nn

from gpipe_fast import _extension
from gpipe_fast.runtime import connections
from gpipe_fast.runtime.connections import Connection, connections_of
from gpipe_fast.skip import Skip

CPU = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(12)]
FAULT = "bytes copied from cuda:1 to cuda:0 arrive changed"


def skip(source: int, target: int) -> Skip:
    return Skip(object(), source, target, 0)  # type: ignore[arg-type]


def routed(
    answer: tuple[str, str], transport: str = "auto", layers: list[nn.Module] | None = None, stages: int = 2
) -> list[Connection]:
    """Returns the connections of stages with one layer each on GPUs whose routes are all the same."""
    with mock.patch.object(_extension, "route", return_value=answer):
        return connections_of(
            [1] * stages, GPUS[:stages], layers or [nn.Identity() for _ in range(stages)], transport
        )


def test_neighbours_come_first_and_skips_share_a_connection() -> None:
    skips = [skip(0, 5), skip(1, 4), skip(0, 1), skip(2, 3), skip(-1, 5)]
    with mock.patch.object(connections, "skips_of", return_value=skips):
        found = connections_of([2, 2, 2], [CPU] * 3, [nn.Identity() for _ in range(6)], "auto")
    assert [(each.sender, each.receiver, each.skips) for each in found] == [
        (0, 1, ()),
        (1, 2, ()),
        (0, 2, (0, 1)),
    ]
    assert {each.route for each in found} == {"hand-over"}
    assert str(found[0]) == "stage 0 (cpu) -> stage 1 (cpu): hand-over"
    assert str(found[2]) == "stage 0 (cpu) -> stage 2 (cpu), skip connection: hand-over"


def test_shared_parameters_are_sent_by_the_last_stage_that_has_them() -> None:
    layers = [nn.Linear(2, 2) for _ in range(4)]
    layers[0].weight = layers[1].weight = layers[3].weight
    found = routed(("peer", ""), layers=list(layers), stages=4)[3:]
    assert list(map(str, found)) == [
        "stage 3 (cuda:3) -> stage 0 (cuda:0), shared parameters: peer",
        "stage 3 (cuda:3) -> stage 1 (cuda:1), shared parameters: peer",
    ]


@pytest.mark.parametrize("number", range(20))
def test_a_route_is_asked_for_only_between_stages_that_exchange_tensors(number: int) -> None:
    """GPUs may have only eight peers each."""
    draw = random.Random(number)
    stages = draw.randint(2, 12)
    devices = [GPUS[draw.randrange(stages)] for _ in range(stages)]
    layers = [nn.Linear(2, 2) for _ in range(stages)]
    expected = {*pairwise(range(stages))}
    skips = [skip(*sorted(draw.sample(range(stages), 2))) for _ in range(draw.randint(0, 2))]
    expected |= {(each.source, each.target) for each in skips}
    if stages > 3 and draw.random() < 0.5:
        first, second = sorted(draw.sample(range(stages), 2))
        layers[first].weight = layers[second].weight
        expected |= {(second, first)} if devices[first] != devices[second] else set()
    with (
        mock.patch.object(connections, "skips_of", return_value=skips),
        mock.patch.object(_extension, "route", return_value=("peer", "")) as asked,
    ):
        found = connections_of([1] * stages, devices, list(layers), "auto")
    assert {(each.sender, each.receiver) for each in found} == expected
    pairs = {call.args[:2] for call in asked.call_args_list}
    assert pairs == {(devices[sender], devices[receiver]) for sender, receiver in expected}


def test_a_fault_is_reported_and_warned_of_once_for_each_pair_of_gpus() -> None:
    connections._warn_of.cache_clear()
    with pytest.warns(UserWarning, match=rf"cuda:0 and cuda:1 .*, but {FAULT}.* IOMMU.* bridge.* BIOS"):
        found = routed(("pinned", FAULT))
    assert str(found[0]) == f"stage 0 (cuda:0) -> stage 1 (cuda:1): pinned ({FAULT})"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        routed(("pinned", FAULT))
        routed(("pinned", ""))  # GPUs that report no peer access
    with pytest.warns(UserWarning, match="cuda:0 and cuda:1 .* exhausted; .* only eight peers"):
        routed(("pinned", "CUDA cannot enable it for cuda:1: peer mapping resources exhausted"))
    connections._warn_of.cache_clear()


@pytest.mark.parametrize("fault", ["", FAULT])
def test_a_requested_peer_copy_that_does_not_work_raises(fault: str) -> None:
    with pytest.raises(ValueError, match=rf"cuda:0 and cuda:1 .* peer access .*memory.*{fault}.*use 'auto'"):
        routed(("pinned", fault), transport="peer")

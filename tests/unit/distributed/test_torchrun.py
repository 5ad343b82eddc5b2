"""The report of a network: its tables, and what differs between ranks or failed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from gpipe_fast.distributed.torchrun import Edge, Network, RankInfo, _own_device

RANKS = [RankInfo(rank, f"host{rank}", f"cuda:{rank}", "2.14.1", "0.1") for rank in range(3)]
EDGES = [Edge(0, 1, "gloo", 25e-6, 1.5e9), Edge(1, 0, "gloo", 30e-6, 2e9)]


def test_a_network_without_problems() -> None:
    network = Network(RANKS, EDGES)
    assert network.problems() == []
    sections = dict(network.sections())
    assert [line.split() for line in sections["ranks"]][1] == ["0", "host0", "cuda:0", "2.14.1", "0.1"]
    assert [line.split() for line in sections["edges"]][1] == ["0", "to", "1", "gloo", "25.0", "1500.0"]
    assert json.loads(json.dumps(network.to_dict()))["edges"][1]["bandwidth"] == 2e9


def test_versions_that_differ_are_a_problem() -> None:
    network = Network([RANKS[0], replace(RANKS[1], torch="2.13.0")], [])
    assert network.problems() == [
        "the versions of torch differ: 2.14.1 on rank 0, 2.13.0 on rank 1; install the same on all hosts"
    ]
    assert dict(network.sections())["edges"] == []


def test_an_edge_that_failed_is_a_problem() -> None:
    network = Network(RANKS, [*EDGES, Edge(1, 2, "nccl", error="timed out")])
    assert network.problems() == ["nccl from rank 1 to 2: timed out"]
    assert [line.split() for line in dict(network.sections())["edges"]][3] == [
        "1",
        "to",
        "2",
        "nccl",
        "failed",
    ]


@pytest.mark.parametrize("missing", ["no GPU", "no NCCL"])
def test_without_a_gpu_or_nccl_the_cpu_is_measured(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: missing != "no GPU")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: missing != "no NCCL")
    assert _own_device() == torch.device("cpu")

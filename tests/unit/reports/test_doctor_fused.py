"""Report lines on fused kernels: why there are none, and what they replace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.reports import doctor
from gpipe_fast.reports.doctor import fused_lines
from gpipe_fast.runtime.stage import Stage

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def model(**changed: Any) -> Any:
    return SimpleNamespace(**{"devices": [GPU], "fuse": True, **changed})


def test_stages_on_the_cpu_have_no_line() -> None:
    assert fused_lines(GPipe(nn.Sequential(nn.Linear(2, 2)), [1])) == []


def test_the_reason_for_no_kernels_is_a_line() -> None:
    assert fused_lines(model(fuse=False)) == ["none, because the model has fuse=False"]
    with mock.patch.object(doctor, "why_unfused", side_effect=lambda device, fuse: f"{device} is old"):
        assert fused_lines(model(devices=[CPU, GPU])) == ["none, because cuda:0 is old"]


def replaced(name: str, saved: int) -> Any:
    return SimpleNamespace(name=name, saved=saved)


def test_equal_kernels_are_counted() -> None:
    stages = [Stage([nn.ReLU(), nn.ReLU()], 3, CPU), Stage([nn.ReLU()], 5, CPU)]
    norm, gelu = replaced("norm", 2**20), replaced("gelu", 2**19)
    graphs = [(stages[0], "forward", [norm, norm, gelu]), (stages[1], "backward", [])]
    with (
        mock.patch.object(doctor, "why_unfused", return_value=None),
        mock.patch.object(doctor, "replaced_by_graph", return_value=graphs),
        mock.patch.object(doctor.left_out, "names", return_value=["wrong"]),
    ):
        assert fused_lines(model()) == [
            "layers 3 to 4, forward: 2 x norm; 1 x gelu (2.5 MiB less traffic)",
            "layer 5, backward: none (0.0 MiB less traffic)",
            "left out: wrong",
        ]


def test_before_the_first_call_nothing_is_known() -> None:
    with (
        mock.patch.object(doctor, "why_unfused", return_value=None),
        mock.patch.object(doctor, "replaced_by_graph", return_value=[]),
        mock.patch.object(doctor.left_out, "names", return_value=[]),
    ):
        assert fused_lines(model()) == ["unknown until the first call"]

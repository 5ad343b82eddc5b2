"""What a step needs, as data and as tables, and the bytes of an optimizer's state."""

from __future__ import annotations

import json
from functools import partial

import torch
from torch import nn

from gpipe_fast.reports.memory_report import MemoryChoice, MemoryChoices, MemoryReport, optimizer_bytes
from gpipe_fast.runtime.stage_memory import StageBytes

MIB = 2**20
CPU = torch.device("cpu")
STAGE = StageBytes(*(MIB for _ in StageBytes._fields))


def test_totals_are_the_sums_of_the_stages_of_a_device() -> None:
    report = MemoryReport((STAGE, STAGE, STAGE), (MIB, 0, 0), ("cuda:0", "cuda:0", "cuda:1"))
    assert report.totals == {"cuda:0": 2 * STAGE.total + MIB, "cuda:1": STAGE.total}
    assert json.loads(json.dumps(report.to_dict()))["totals"] == report.totals
    assert f"{(STAGE.total + MIB) / MIB:.2f}" in str(report)


def test_a_stage_in_python_makes_the_total_unknown() -> None:
    report = MemoryReport(
        (None, STAGE, STAGE), (0, 0, 0), ("cpu", "cpu", "cuda:0"), unknown=("layer 0 runs in Python", "", "")
    )
    assert report.totals == {"cpu": None, "cuda:0": STAGE.total}
    assert report.to_dict()["stages"][0] is None
    assert str(report).endswith("stage 0: layer 0 runs in Python")
    assert report._repr_html_().count("<table>") == 2


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(6), requires_grad=False)]


def test_the_state_of_an_optimizer() -> None:
    """Adam keeps two tensors and a number of steps for each parameter that requires a gradient."""
    adam = 2 * 6 * 4 * 4 + 4
    assert optimizer_bytes(torch.optim.AdamW, parameters(), CPU) == adam
    assert optimizer_bytes(torch.optim.Adam(parameters()), parameters(), CPU) == adam
    assert optimizer_bytes(partial(torch.optim.SGD, lr=0.1), parameters(), CPU) == 0
    momentum = torch.optim.SGD(parameters(), lr=0.1, momentum=0.9)
    assert optimizer_bytes(momentum, parameters(), CPU) == 6 * 4 * 4
    assert optimizer_bytes(None, parameters(), CPU) == 0
    assert optimizer_bytes(torch.optim.AdamW, [], CPU) == 0
    assert not momentum.state
    # Each tensor takes a block of 512 bytes; the number of steps stays on the host.
    assert optimizer_bytes(torch.optim.AdamW, parameters(), torch.device("cuda")) == 2 * 512


def test_choices_are_code_that_can_be_pasted() -> None:
    choices = MemoryChoices(
        tuple(MemoryChoice({"balance": [2, n], "chunks": 4}, n / 1e3, (n * MIB, MIB)) for n in (3, 5))
    )
    assert choices.code == choices.choices[0].code
    assert "balance" in choices.code
    first, second = json.loads(json.dumps(choices.to_dict()))["choices"]
    assert (first["seconds"], first["bytes"]) == (3e-3, [3 * MIB, MIB])
    assert second["settings"] == {"balance": [2, 5], "chunks": 4}
    assert "5.00 MiB + 1.00 MiB" in str(choices)
    assert "<table>" in choices._repr_html_()

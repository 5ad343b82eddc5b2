"""`doctor --check` on cheap models: equal, differing and failing cases."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.doctor import check
from gpipe_fast.doctor.__main__ import main
from gpipe_fast.reports import checkup as checkups

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = ["always", "except_attention", "except_last", "never"]


def small() -> tuple[nn.Sequential, Tensor]:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.ones(8, 4)


def broken() -> tuple[nn.Sequential, Tensor]:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5)), torch.ones(8, 4)


@contextmanager
def checked_models(**makers: object) -> Iterator[None]:
    with (
        mock.patch.object(checkups, "MODELS", makers),
        mock.patch.dict(os.environ),
        warnings.catch_warnings(),
    ):
        yield
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_passing_check_reports_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    with checked_models(small=small):
        assert main(["--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "versions"
    assert [line.split() for line in lines if line.startswith("small")] == [
        ["small", "hand-over", mode, "equal,", "4", "tensors"] for mode in MODES
    ]
    assert lines[-3].endswith(
        "always            skipped: the stage is on the CPU, where PyTorch's operators run"
    )
    assert lines[-1].startswith("all 5 cases are right, on cpu, cpu (")


def test_every_built_in_model_passes_the_check() -> None:
    with mock.patch.object(checkups, "CHECKPOINT_MODES", ["except_last"]):
        checkup = check()
    assert checkup, checkup
    assert "GPT with dropout          hand-over  except_last       equal, 29 tensors\n" in str(checkup)
    assert checkup.stages == ("cpu", "cpu")
    assert [case.model for case in checkup.cases] == [*checkups.MODELS, "fused kernels"]


def test_differing_and_failing_cases_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    forward = GPipe.forward
    with (
        checked_models(broken=broken, small=small),
        mock.patch.object(GPipe, "forward", lambda self, x: forward(self, x) * 1.5),
    ):
        assert main(["--check", "--devices", "cpu", "cpu"]) == 1
    report = capsys.readouterr().out
    assert report.count("FAILED: ") == 4
    assert report.count("4 of 4 tensors DIFFER, ") == 4
    assert report.splitlines()[-1].startswith(
        "8 of 9 cases differ from the plain loop or failed, on cpu, cpu ("
    )


def test_wrong_fused_kernels_fail_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = (False, "WRONG, or not compiled or loaded: cross_entropy._whole_rows")
    with checked_models(small=small), mock.patch.object(checkups, "check_fused", return_value=wrong):
        assert main(["--check"]) == 1
    *_, line, _, headline = capsys.readouterr().out.splitlines()
    assert line.endswith("WRONG, or not compiled or loaded: cross_entropy._whole_rows")
    assert headline.startswith("1 of 5 cases differ from the plain loop or failed, ")


def test_every_transport_between_gpus_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates two GPUs. The cases run with deterministic settings."""
    seen: list[tuple[str, bool, str | None]] = []

    def compare(cls: Any, make: Any, devices: Any, transport: str, checkpoint: str) -> tuple[bool, str]:
        enabled = torch.are_deterministic_algorithms_enabled()
        seen.append((transport, enabled, os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
        return True, "equal"

    monkeypatch.setattr(checkups, "_compare", compare)
    monkeypatch.setattr(checkups, "check_fused", lambda *given: (True, f"on {given[-1]}"))
    monkeypatch.setattr(
        checkups._devices, "default_devices", lambda: [torch.device("cuda", i) for i in range(2)]
    )
    monkeypatch.setattr(checkups, "CHECKPOINT_MODES", ["never"])
    for peer_access, transports in ((True, ["auto", "peer", "pinned"]), (False, ["auto", "pinned"])):
        monkeypatch.setattr(
            torch.cuda, "can_device_access_peer", lambda one, other, peer_access=peer_access: peer_access
        )
        seen.clear()
        with checked_models(small=small):
            checkup = check()
        assert checkup.stages == ("cuda:0", "cuda:1")
        assert seen == [(transport, True, ":4096:8") for transport in transports]
        assert [case.transport for case in checkup.cases] == [*transports, ""]
        assert checkup.cases[-1].result == "on cuda:0"

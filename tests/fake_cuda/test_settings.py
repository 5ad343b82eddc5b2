"""A graph that was captured under some PyTorch settings is not replayed under others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda.build import can_build
from tests.fake_cuda.process import run

pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
)


def test_a_changed_setting_is_captured_again(libraries: tuple[Path, Path]) -> None:
    assert run("settings_cases.py", libraries, "cuda:0,cuda:0,cuda:0,cuda:0") == ["equal"]

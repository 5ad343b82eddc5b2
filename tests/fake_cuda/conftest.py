"""Fixtures for tests on the fake CUDA runtime, which skip them where it cannot be built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fake_cuda import process
from tests.fake_cuda.build import build, can_build
from tests.fake_cuda.race_detector import Line, read


@pytest.fixture(scope="session")
def libraries() -> tuple[Path, Path]:
    """Returns the paths of the runtime and of the operators."""
    if not can_build():
        pytest.skip("needs an extension built with CUDA, and the toolkit's headers")
    return build()


@pytest.fixture
def run(libraries: tuple[Path, Path]) -> Callable[..., list[str]]:
    """Runs a program of this folder, and returns the lines that it prints."""
    return lambda program, *words, **variables: process.run(program, libraries, *words, **variables)


@pytest.fixture
def logged(run: Callable[..., list[str]], tmp_path: Path) -> Callable[..., list[Line]]:
    """Runs a program of this folder, compares what it prints with `expected`, and returns the log."""

    def run_and_read(program: str, *words: str, expected: list[str], **variables: object) -> list[Line]:
        assert run(program, *words, log=tmp_path / "log", **variables) == expected
        return read(tmp_path / "log")

    return run_and_read

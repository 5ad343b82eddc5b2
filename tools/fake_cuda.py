"""Calls functions in processes with the fake CUDA runtime of tests/fake_cuda."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import process
from tests.fake_cuda.build import build, can_build


def libraries(name: str) -> tuple[Path, Path] | None:
    """Returns the libraries of the runtime and of the operators; says why, and returns None, without them."""
    if can_build():
        return build()
    print(f"{name}: skipped, needs an extension built with CUDA and the toolkit's headers", flush=True)
    return None


def call(
    runtime: Path, function: str, *arguments: Any, environment: Mapping[str, str | None] | None = None
) -> Any:
    """Calls a function as `bench.process.call` does, with the library of the fake runtime."""
    variables = {"LD_PRELOAD": str(runtime), "CUDA_VISIBLE_DEVICES": None, **(environment or {})}
    return process.call(function, *arguments, environment=variables)

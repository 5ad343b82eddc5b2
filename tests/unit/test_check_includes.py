"""The check of includes in csrc/: it passes on the tree and finds every kind of forbidden include."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check_includes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_includes", ROOT / ".ci" / "check_includes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tree_has_no_forbidden_includes(check_includes: ModuleType) -> None:
    assert check_includes.find_errors(ROOT / "csrc") == []
    assert check_includes.ALLOWED_INCLUDES.keys() == {
        path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()
    }


def test_includes_between_folders_are_acyclic(check_includes: ModuleType) -> None:
    remaining = {folder: set(below) for folder, below in check_includes.ALLOWED_INCLUDES.items()}
    while remaining:
        lowest = {folder for folder, below in remaining.items() if not below & remaining.keys()}
        assert lowest, f"these include each other: {sorted(remaining)}"
        remaining = {folder: below for folder, below in remaining.items() if folder not in lowest}


@pytest.mark.parametrize(
    ("folder", "line", "message"),
    [
        ("engine", '#include "pipeline/plan.h"', "must not include pipeline/"),
        ("engine", "#include <torch/extension.h>", "must not include PyTorch headers"),
        ("program", '#include "bindings/bindings.h"', "must not include bindings/"),
        ("elsewhere", '#include "check.h"', "is not a folder listed"),
    ],
)
def test_a_forbidden_include_is_reported(
    check_includes: ModuleType, tmp_path: Path, folder: str, line: str, message: str
) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "file.cpp").write_text(f'#include "check.h"\n{line}\n')
    errors = check_includes.find_errors(tmp_path)
    assert message in errors[-1]


def test_allowed_includes_are_not_reported(check_includes: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    text = (
        '#include "program/program.h"\n'
        '#include "engine/cancellation_token.h"\n'
        "#include <ATen/core/Tensor.h>\n"
    )
    (tmp_path / "program" / "file.cpp").write_text(text)
    assert check_includes.find_errors(tmp_path) == []

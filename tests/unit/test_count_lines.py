"""The count of lines of code: blank lines, comments and docstrings are left out, and no file counts twice."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = '''"""A module.

With a docstring."""

# A comment.
TEXT = """A string

is code."""


def function(x):  # a comment
    """A docstring."""
    return (
        x
    )
'''
CPP = """// A comment.
#include <string>  // another

/* A longer
   comment. */
const char* url = "http://host";  /* a */ int x;
/* b */
"""


@pytest.fixture(scope="module")
def count_lines() -> ModuleType:
    spec = importlib.util.spec_from_file_location("count_lines", ROOT / ".ci" / "count_lines.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_blank_lines_comments_and_docstrings_are_left_out(count_lines: ModuleType) -> None:
    assert count_lines.python_lines(PYTHON) == 3 + 4
    assert count_lines.cpp_lines(CPP) == 2


def test_a_folder_that_is_linked_counts_once(count_lines: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.py").write_text(PYTHON)
    (tmp_path / "gpipe_fast" / "fuse").mkdir(parents=True)
    (tmp_path / "gpipe_fast" / "fuse" / "b.py").write_text("x = 1\n")
    (tmp_path / "gpipe_fast" / "kernels").symlink_to("../kernels")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "c.cu").write_text(CPP)
    (tmp_path / "csrc" / "d.h").write_text(CPP * 2)
    assert count_lines.count(tmp_path, count_lines.ROWS["product"]) == {"Python": 8, "C++": 4, "CUDA": 2}
    assert count_lines.count(tmp_path, count_lines.ROWS["kernels and fuse"])["Python"] == 8

"""What contributors are told agrees with the Makefile: the pre-commit hooks and CI."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_pre_commit_runs_the_commands_of_make_lint() -> None:
    """But pre-commit passes the names of the files that changed."""
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [line.strip().lstrip("@").split(" >/dev/null")[0] for line in recipe.splitlines()]
    commands = [c.replace("$(VENV)", ".venv").replace("$(PY)", ".venv/bin/python") for c in commands]
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    assert [hook["entry"] for hook in repository["hooks"]] == [
        c.replace(" $(CXX_FILES)", "") for c in commands
    ]


def test_ci_runs_the_entry_point_with_a_time_limit() -> None:
    (job,) = read(".github/workflows/ci.yml")["jobs"].values()
    assert job["timeout-minutes"] > 0
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert "exec make test-all" in (ROOT / ".ci" / "run").read_text()


def test_slow_tests_exist() -> None:
    lines = [line for line in (ROOT / "tests" / "slow.txt").read_text().splitlines() if "::" in line]
    assert lines
    for line in lines:
        path, _, name = line.partition("::")
        assert f"def {name.rpartition('::')[2]}(" in (ROOT / path).read_text(), f"tests/slow.txt: {line}"

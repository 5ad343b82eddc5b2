"""What contributors are told agrees with the Makefile: the guide, the pre-commit hooks, CI and the forms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def lint_commands() -> list[str]:
    """Returns the commands of `make lint`, in which variables are replaced."""
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    commands = [line.strip().lstrip("@").split(" >/dev/null")[0] for line in recipe.splitlines()]
    commands = [c.replace("$(VENV)", ".venv").replace("$(PY)", ".venv/bin/python") for c in commands]
    # pre-commit passes the names of the files that changed.
    return [c.replace(" $(CXX_FILES)", "") for c in commands]


def test_pre_commit_runs_the_commands_of_make_lint() -> None:
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    assert [hook["entry"] for hook in repository["hooks"]] == lint_commands()
    assert all(hook["language"] == "system" for hook in repository["hooks"])


def test_the_make_targets_of_the_guide_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    named = set(re.findall(r"(?:`|\$ )make ([a-z-]+)", GUIDE))
    assert len(named) >= 8
    assert named <= targets


def test_ci_runs_the_entry_point_with_a_time_limit() -> None:
    (job,) = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"].values()
    assert job["timeout-minutes"] > 0
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert "exec make test-all" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_complete(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= set(form)
    identifiers = [field["id"] for field in form["body"]]
    assert len(identifiers) == len(set(identifiers))
    assert all(field["attributes"]["label"] for field in form["body"])


def test_the_bug_report_asks_for_the_self_test() -> None:
    fields = {field["id"]: field for field in read(ROOT / ".github/ISSUE_TEMPLATE/bug_report.yml")["body"]}
    assert "python -m gpipe_fast.doctor --check" in fields["doctor"]["attributes"]["label"]
    assert (ROOT / "gpipe_fast" / "doctor" / "__main__.py").exists()
    assert fields["doctor"]["validations"]["required"]

"""The source distribution is complete, and the package's metadata agree with the tree and its pins."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

import gpipe_fast

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # a dependency of pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]

# What a build leaves in a tree, and git ignores.
BUILD_OUTPUTS = (
    "csrc/engine/engine.o",
    "csrc/engine/__pycache__/engine.cpython-311.pyc",
    "gpipe_fast/_C.cpython-311-x86_64-linux-gnu.so",
    "gpipe_fast/__pycache__/gpipe.cpython-311.pyc",
    "kernels/__pycache__/launch.cpython-311.pyc",
    "build/lib/gpipe_fast/gpipe.py",
    ".venv/lib/python3.11/site-packages/torch/__init__.py",
)
# What setuptools adds to every source distribution.
ADDED = {"PKG-INFO", "setup.cfg"}
DOCUMENTS = {"README.md", "LICENSE", "CHANGELOG.md"}


def needed_to_build() -> set[str]:
    """Returns the paths of all files that a build from source reads, as git knows them or would."""
    patterns = ("csrc/**/*", "kernels/**/*.py", "gpipe_fast/*", "gpipe_fast/**/*.py")
    patterns += ("gpipe_fast/reports/page/*",)
    found = {p for pattern in patterns for p in ROOT.glob(pattern) if p.is_file()}
    # gpipe_fast/kernels is a symbolic link to kernels/.
    names = {p.relative_to(ROOT).as_posix() for p in found if "kernels" not in p.relative_to(ROOT).parts[1:]}
    ignored = {name for name in names if name.endswith((".so", ".pyc", ".o"))}
    return (names - ignored) | {"setup.py", "pyproject.toml", "MANIFEST.in"}


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Builds the source distribution in a copy of the tree with build outputs, and returns its files."""
    folder = tmp_path_factory.mktemp("sdist")
    for name in needed_to_build() | DOCUMENTS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "gpipe_fast" / "kernels").symlink_to("../kernels")
    for name in BUILD_OUTPUTS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    command = [sys.executable, "setup.py", "--quiet", "sdist"]
    # Without CUDA, setup.py does not name the files in csrc/cuda; the source distribution must hold them too.
    environment = {**os.environ, "GPIPE_FAST_CUDA": "0"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    top = f"gpipe_fast-{gpipe_fast.__version__}"
    with tarfile.open(folder / "dist" / f"{top}.tar.gz") as archive:
        files = {Path(member.name) for member in archive.getmembers() if not member.isdir()}
    return {file.relative_to(top).as_posix() for file in files}


def test_the_source_distribution_holds_all_that_a_build_needs_and_no_build_output(members: set[str]) -> None:
    needed = needed_to_build()
    assert {"csrc/cuda/random_kernel.cu", "csrc/engine/engine.h", "kernels/stack.py"} <= needed
    assert {"gpipe_fast/py.typed", "gpipe_fast/_C.pyi", "gpipe_fast/gpipe.py"} <= needed
    metadata = {name for name in members if name.startswith("gpipe_fast.egg-info/")} | ADDED
    assert members - metadata == needed | DOCUMENTS


def test_the_list_of_packages_is_complete() -> None:
    folders = {path.parent for path in (ROOT / "gpipe_fast").rglob("*.py")} | {ROOT / "gpipe_fast/kernels"}
    found = sorted(".".join(folder.relative_to(ROOT).parts) for folder in folders)
    assert PYPROJECT["tool"]["setuptools"]["packages"] == found


def pinned() -> dict[str, Version]:
    """Returns the pinned version of every package: in requirements.txt, and of torch in the Makefile."""
    lines = re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    (newest,) = re.findall(r"^TORCH \?= (\S+)$", makefile, re.MULTILINE)
    vision = f"0.{15 + Version(newest).minor}"  # as the Makefile derives it
    return {name: Version(version) for name, version in [*lines, ("torch", newest), ("torchvision", vision)]}


@pytest.mark.parametrize("extra", ["dependencies", *PROJECT["optional-dependencies"]])
def test_the_pins_satisfy_the_requirements(extra: str) -> None:
    """The dependencies of torch, such as sympy, are not pinned."""
    lines = PROJECT["dependencies"] if extra == "dependencies" else PROJECT["optional-dependencies"][extra]
    pins = pinned()
    for requirement in map(Requirement, lines):
        if requirement.name != "sympy":
            assert requirement.name in pins, f"{requirement.name} is not in requirements.txt"
            assert requirement.specifier.contains(pins[requirement.name]), requirement


def test_every_supported_torch_is_in_the_range_of_the_requirement() -> None:
    (torch_range,) = (r.specifier for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch")
    makefile = (ROOT / "Makefile").read_text()
    (reference,) = re.findall(r"^REFERENCE_TORCH \?= (\S+)$", makefile, re.MULTILINE)
    (between,) = re.findall(r"^INTERMEDIATE_TORCH \?= (\S+)$", makefile, re.MULTILINE)
    for version in (reference, between, torch.__version__.partition("+")[0]):
        assert torch_range.contains(version), version


def test_the_changelog_has_unreleased_changes_and_names_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[0] == "[Unreleased]"
    assert gpipe_fast.__version__ in text

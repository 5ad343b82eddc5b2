"""The source distribution is complete, and the package's metadata agree with the tree and its pins."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

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
    "gpipe_fast/_C.cpython-311-x86_64-linux-gnu.so",
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
    patterns += ("gpipe_fast/reports/page/*", "docs/**/*.md", "docs/images/*", "docs/pipeline.html")
    found = {p for pattern in patterns for p in ROOT.glob(pattern) if p.is_file()}
    # In gpipe_fast/, docs and kernels are symbolic links.
    names = {p.relative_to(ROOT).as_posix() for p in found if p.parent == p.parent.resolve()}
    ignored = {name for name in names if name.endswith((".so", ".pyc", ".o"))}
    return (names - ignored) | {"setup.py", "pyproject.toml", "MANIFEST.in"}


def test_the_source_distribution_holds_all_that_a_build_needs_and_no_build_output(tmp_path: Path) -> None:
    """Builds it in a copy of the tree with build outputs."""
    needed = needed_to_build()
    assert {"csrc/cuda/random_kernel.cu", "csrc/engine/engine.h", "kernels/launch.py"} <= needed
    assert {"gpipe_fast/py.typed", "gpipe_fast/_C.pyi", "gpipe_fast/gpipe.py"} <= needed
    for name in needed | DOCUMENTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("docs", "kernels"):
        (tmp_path / "gpipe_fast" / name).symlink_to(f"../{name}")
    for name in BUILD_OUTPUTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    command = [sys.executable, "setup.py", "--quiet", "sdist", "build_py", "--build-lib", "lib"]
    # Without CUDA, setup.py does not name the files in csrc/cuda; the source distribution must hold them too.
    environment = {**os.environ, "GPIPE_FAST_CUDA": "0"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)
    top = f"gpipe_fast-{gpipe_fast.__version__}"
    with tarfile.open(tmp_path / "dist" / f"{top}.tar.gz") as archive:
        files = {Path(member.name).relative_to(top) for member in archive.getmembers() if not member.isdir()}
    members = {file.as_posix() for file in files if file.parts[0] != "gpipe_fast.egg-info"}
    assert members - ADDED == needed | DOCUMENTS
    installed = tmp_path / "lib" / "gpipe_fast"
    pages = {name for name in needed if name.startswith("docs/")}
    assert {p.relative_to(installed).as_posix() for p in installed.glob("docs/**/*") if p.is_file()} == pages


def test_the_list_of_packages_is_complete() -> None:
    folders = {path.parent for path in (ROOT / "gpipe_fast").rglob("*.py")}
    folders |= {ROOT / "gpipe_fast/docs", ROOT / "gpipe_fast/kernels"}
    found = sorted(".".join(folder.relative_to(ROOT).parts) for folder in folders)
    assert PYPROJECT["tool"]["setuptools"]["packages"] == found


def test_the_pins_and_every_supported_torch_satisfy_the_requirements() -> None:
    """The dependencies of torch, such as sympy, are not pinned."""
    pins = [*re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)]
    makefile = (ROOT / "Makefile").read_text()
    torches = re.findall(r"^(?:\w+_)?TORCH \?= (\S+)$", makefile, re.MULTILINE)
    assert len(torches) == 3
    vision = f"0.{15 + Version(torches[0]).minor}"  # as the Makefile derives it
    pins += [("torchvision", vision), *(("torch", version) for version in torches)]
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    for requirement in map(Requirement, [*PROJECT["dependencies"], *extras]):
        versions = [version for name, version in pins if name == requirement.name]
        assert versions or requirement.name == "sympy", f"{requirement.name} is not in requirements.txt"
        assert all(map(requirement.specifier.contains, versions)), requirement

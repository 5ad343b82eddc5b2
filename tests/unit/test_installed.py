"""The wheel: its contents, its size, and that it works with only its dependencies installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
# In bytes. With debug information, the library alone took 72 MB.
LARGEST_WHEEL = 8 << 20


def build_wheel(folder: Path) -> Path:
    """Builds the wheel from the object files of `make build`, so that nothing is compiled again."""
    objects = f"build/{Path(sys.prefix).name}-torch-{torch.__version__.partition('+')[0]}"
    for old in (ROOT / "build").glob("lib.*"):
        shutil.rmtree(old)
    # Two processes, because within one the second build's command lines would differ from the first's.
    for command in (["build", "--build-temp", objects], ["bdist_wheel", "--skip-build", "-d", str(folder)]):
        whole = [sys.executable, "setup.py", "--quiet", *command]
        done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.extended
def test_every_public_function_works_with_declared_dependencies_alone(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    check_contents(wheel)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*command, str(tmp_path / "site"), str(wheel)], check=True)
    program = Path(__file__).with_name("installed_program.py")
    # Without NumPy, torch would warn.
    warnings = ["-W", "ignore", "-W", "error:Failed to initialize NumPy"]
    command = [sys.executable, "-I", *warnings, str(program), str(tmp_path / "site")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def check_contents(wheel: Path) -> None:
    """Checks that a wheel holds all modules of the library and nothing else, and is small."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "gpipe_fast").rglob("*.py")}
    modules |= {f"gpipe_fast/{path.relative_to(ROOT)}" for path in (ROOT / "kernels").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"gpipe_fast"}
    assert {"gpipe_fast/py.typed", "gpipe_fast/_C.pyi"} <= set(names)
    assert any(name.startswith("gpipe_fast/_C.") and name.endswith(".so") for name in names)
    assert wheel.stat().st_size <= LARGEST_WHEEL

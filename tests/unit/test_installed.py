"""The wheel: its contents, its size, and that it works without the tree."""

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

PROGRAM = """
import importlib, pkgutil, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch, gpipe_fast
assert Path(gpipe_fast.__file__).is_relative_to(sys.argv[1])
for module in pkgutil.walk_packages(gpipe_fast.__path__, "gpipe_fast."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
model = gpipe_fast.GPipe(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), [1, 1], chunks=4)
report = gpipe_fast.verify(model, torch.randn(8, 8), lambda y: y.square().mean())
assert report.ok, report
"""


@pytest.mark.extended
def test_the_wheel_holds_all_modules_and_nothing_else_and_works(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="modules of kernels import it")
    # From the object files of `make build`, so that nothing is compiled again.
    objects = f"build/{Path(sys.prefix).name}-torch-{torch.__version__.partition('+')[0]}"
    for old in (ROOT / "build").glob("lib.*"):
        shutil.rmtree(old)
    # Two processes, because within one the second build's command lines would differ from the first's.
    for command in (["build", "--build-temp", objects], ["bdist_wheel", "--skip-build", "-d", str(tmp_path)]):
        subprocess.run([sys.executable, "setup.py", "--quiet", *command], cwd=ROOT, check=True, timeout=1200)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "gpipe_fast").rglob("*.py")}
    modules |= {f"gpipe_fast/{path.relative_to(ROOT)}" for path in (ROOT / "kernels").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"gpipe_fast"}
    assert {"gpipe_fast/py.typed", "gpipe_fast/_C.pyi"} <= set(names)
    assert wheel.stat().st_size <= LARGEST_WHEEL
    command = [sys.executable, "-I", "-c", PROGRAM, str(tmp_path / "site")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr

"""The build's choices of CUDA and architectures, and what the extension reports about its build."""

import ast
import os
import pty
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gpipe_fast

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # a dependency of pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def setup_py():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "setup.py"), run_name="setup"))


def test_toolkit_and_torch_decide_whether_to_build_with_cuda(setup_py):
    for request, torch_cuda, toolkit, cuda in (
        ("", "13.0", "13.2", True),
        ("", "13.0", "12.8", False),
        ("", "13.0", None, False),
        ("", None, "13.0", False),
        ("0", "13.0", "13.0", False),
        ("1", "13.0", "13.0", True),
    ):
        chosen, reason = setup_py.choose_cuda(request, torch_cuda, toolkit)
        assert chosen is cuda
        assert (torch_cuda or "no") in reason
        assert (toolkit or "not found") in reason
    for torch_cuda, toolkit in (("13.0", None), (None, "13.0"), ("13.0", "12.8")):
        found = f"torch built with CUDA: {torch_cuda or 'no'}, CUDA toolkit: {toolkit or 'not found'}"
        with pytest.raises(SystemExit, match=found):
            setup_py.choose_cuda("1", torch_cuda, toolkit)
    with pytest.raises(SystemExit, match="must be 0 or 1, but is 'yes'"):
        setup_py.choose_cuda("yes", "13.0", "13.0")


def test_architectures_come_from_the_environment_the_gpus_or_torch(setup_py):
    flags = "sm_75 sm_80 sm_90 sm_100 compute_120"
    assert setup_py.choose_archs("8.0;9.0", [(9, 0)], flags) == ("8.0;9.0", "TORCH_CUDA_ARCH_LIST")
    assert setup_py.choose_archs(None, [(9, 0), (8, 6), (9, 0)], flags) == ("8.6;9.0", "the visible GPUs")
    reason = "the oldest of torch, since no GPU is visible"
    assert setup_py.choose_archs("", [], flags) == ("7.5+PTX", reason)
    assert setup_py.choose_archs("", [], "")[0] == setup_py.choose_archs("", [], None)[0] == "8.0+PTX"


def test_architectures_below_7_0_are_left_out_or_refused(setup_py):
    torch_126 = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"
    archs, reason = setup_py.choose_archs(None, [], torch_126)
    assert (archs, "left out" in reason) == ("7.0+PTX", False)
    archs, reason = setup_py.choose_archs("6.0;9.0", [], torch_126)
    left_out = "left out: 6.0, because the kernels need compute capability 7.0"
    assert (archs, reason) == ("9.0", f"TORCH_CUDA_ARCH_LIST; {left_out}")
    assert setup_py.choose_archs(None, [(6, 1), (8, 0)], "")[0] == "8.0"
    assert setup_py.choose_archs("6.0 8.0;9.0a+PTX", [], torch_126)[0] == "8.0;9.0a+PTX"
    assert setup_py.choose_archs("Ampere", [], "")[0] == "Ampere"
    for requested, visible, found in (
        ("6.0+PTX", [], r"6\.0\+PTX \(TORCH_CUDA_ARCH_LIST\)"),
        ("", [(6, 1)], r"6\.1 \(the visible GPUs\)"),
    ):
        with pytest.raises(SystemExit, match=rf"need compute capability 7\.0, but found only {found}"):
            setup_py.choose_archs(requested, visible, "")


def test_a_build_whose_output_is_hidden_shows_its_progress_on_the_terminal(tmp_path):
    """As under pip, which keeps the output of a build."""
    program = f"""
import runpy, subprocess
setup = runpy.run_path({str(ROOT / "setup.py")!r}, run_name="setup")
with setup["shortened_ninja_output"]():
    subprocess.run(["echo", "[3/37] c++ -c csrc/engine/engine.cpp -o engine.o"])
    subprocess.run(["echo", "ninja: done"])
"""
    output, shown = tmp_path / "output", []

    def read(descriptor):
        shown.append(os.read(descriptor, 1024))
        return shown[-1]

    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} > {shlex.quote(str(output))}"
    assert pty.spawn(["sh", "-c", command], read) == 0
    assert b"".join(shown).split() == b"[3/37] csrc/engine/engine.cpp".split()
    assert output.read_text() == "[3/37] csrc/engine/engine.cpp\nninja: done\n"


def test_a_toolkit_without_headers_is_skipped(setup_py, tmp_path, monkeypatch):
    for name in ("whole", "wrapper"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "nvcc").touch(mode=0o755)
    (tmp_path / "whole" / "include").mkdir()
    (tmp_path / "whole" / "include" / "cuda.h").write_text("#define CUDA_VERSION 13010\n")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "wrapper"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "whole" / "bin"))
    assert setup_py.find_toolkit() == (str(tmp_path / "whole"), "13.1")


@pytest.mark.smoke
def test_the_extension_reports_how_it_was_built():
    info = gpipe_fast.build_info()
    assert info["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert gpipe_fast.built_with_cuda() is (info["cuda"] != "none") is (info["cuda_archs"] != "none")
    if gpipe_fast.built_with_cuda():
        assert info["cuda"].split(".")[0] == torch.version.cuda.split(".")[0]


def imported_packages(path):
    """Returns the top-level names of third-party packages that a file imports at run time."""
    names, pending = set(), [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.split(".")[0])
        pending += ast.iter_child_nodes(node)
    return names - sys.stdlib_module_names - {"gpipe_fast"}


def test_every_import_is_a_declared_dependency():
    """Triton, a dependency of torch, is exempt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in project["dependencies"]}
    launching = [*(ROOT / "kernels").glob("*.py"), *(ROOT / "gpipe_fast" / "fuse").rglob("*.py")]
    for path in {*(ROOT / "gpipe_fast").rglob("*.py"), *launching}:
        exempt = {"triton"} if path in launching else set()
        assert imported_packages(path) <= declared | exempt, path

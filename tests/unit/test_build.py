"""The build's choices of CUDA and architectures, and what the extension reports about its build."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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
    spec = importlib.util.spec_from_file_location("gpipe_fast_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("request_", "torch_cuda", "toolkit", "cuda"),
    [
        ("", "13.0", "13.0", True),
        ("", "13.0", "13.2", True),
        ("", "13.0", "12.8", False),
        ("", "13.0", None, False),
        ("", None, "13.0", False),
        ("", None, None, False),
        ("0", "13.0", "13.0", False),
        ("0", None, None, False),
        ("1", "13.0", "13.0", True),
    ],
)
def test_toolkit_and_torch_decide_whether_to_build_with_cuda(setup_py, request_, torch_cuda, toolkit, cuda):
    chosen, reason = setup_py.choose_cuda(request_, torch_cuda, toolkit)
    assert chosen is cuda
    assert (torch_cuda or "no") in reason
    assert (toolkit or "not found") in reason


@pytest.mark.parametrize(("torch_cuda", "toolkit"), [("13.0", None), (None, "13.0"), ("13.0", "12.8")])
def test_forcing_cuda_where_it_is_missing_reports_what_was_found(setup_py, torch_cuda, toolkit):
    found = f"torch built with CUDA: {torch_cuda or 'no'}, CUDA toolkit: {toolkit or 'not found'}"
    with pytest.raises(SystemExit, match=found):
        setup_py.choose_cuda("1", torch_cuda, toolkit)


def test_an_invalid_cuda_request_is_refused(setup_py):
    with pytest.raises(SystemExit, match="must be 0 or 1, but is 'yes'"):
        setup_py.choose_cuda("yes", "13.0", "13.0")


def test_architectures_come_from_the_environment_the_gpus_or_torch(setup_py):
    flags = "sm_75 sm_80 sm_90 sm_100 compute_120"
    assert setup_py.choose_archs("8.0;9.0", [(9, 0)], flags) == ("8.0;9.0", "TORCH_CUDA_ARCH_LIST")
    assert setup_py.choose_archs(None, [(9, 0), (8, 6), (9, 0)], flags) == ("8.6;9.0", "the visible GPUs")
    assert setup_py.choose_archs("", [], flags)[0] == "7.5;8.0;9.0;10.0+PTX"
    assert setup_py.choose_archs("", [], "")[0] == setup_py.DEFAULT_ARCHS
    assert setup_py.choose_archs("", [], None)[0] == setup_py.DEFAULT_ARCHS


def test_architectures_below_7_0_are_left_out(setup_py):
    torch_126 = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"
    archs, reason = setup_py.choose_archs(None, [], torch_126)
    assert archs == "7.0;7.5;8.0;8.6;9.0+PTX"
    left_out = "left out: 5.0 6.0, because the kernels need compute capability 7.0"
    assert reason == f"as torch, since no GPU is visible; {left_out}"
    assert setup_py.choose_archs(None, [(6, 1), (8, 0)], "")[0] == "8.0"
    archs, reason = setup_py.choose_archs("6.0 8.0;9.0a+PTX", [], torch_126)
    assert archs == "8.0;9.0a+PTX"
    assert "left out: 6.0" in reason
    assert setup_py.choose_archs("Ampere", [], "")[0] == "Ampere"


def test_without_a_supported_architecture_the_build_is_refused(setup_py):
    for requested, visible, found in (
        ("6.0+PTX", [], r"6\.0\+PTX \(TORCH_CUDA_ARCH_LIST\)"),
        ("", [(6, 1)], r"6\.1 \(the visible GPUs\)"),
    ):
        with pytest.raises(SystemExit, match=rf"need compute capability 7\.0, but found only {found}"):
            setup_py.choose_archs(requested, visible, "")


def make_toolkit(root, *, headers):
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "nvcc").touch(mode=0o755)
    if headers:
        (root / "include").mkdir()
        (root / "include" / "cuda.h").write_text("#define CUDA_VERSION 13010\n")
    return root


def test_a_toolkit_without_headers_is_skipped(setup_py, tmp_path, monkeypatch):
    whole, wrapper = make_toolkit(tmp_path / "a", headers=True), make_toolkit(tmp_path / "b", headers=False)
    monkeypatch.setenv("CUDA_HOME", str(wrapper))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(whole / "bin"))
    assert setup_py.find_toolkit() == (str(whole), "13.1")


@pytest.mark.smoke
def test_the_extension_reports_how_it_was_built():
    info = gpipe_fast.build_info()
    assert info["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert gpipe_fast.built_with_cuda() is (info["cuda"] != "none") is (info["cuda_archs"] != "none")
    if gpipe_fast.built_with_cuda():
        assert info["cuda"].split(".")[0] == torch.version.cuda.split(".")[0]


def import_package_in(folder, **files):
    """Imports a copy of the package without its extension, but with `files`, in a new process."""
    package = folder / "gpipe_fast"
    shutil.copytree(
        ROOT / "gpipe_fast", package, ignore=shutil.ignore_patterns("*.so", "__pycache__", "kernels")
    )
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", "import gpipe_fast"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_importing_without_the_extension_says_how_to_build_it(tmp_path):
    result = import_package_in(tmp_path)
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: gpipe_fast's C++ extension does not load")
    assert "No module named 'gpipe_fast._C'" in last
    assert "run `make` in the source tree, or `pip install --no-build-isolation .`" in last


def test_an_extension_built_for_another_torch_is_refused(tmp_path):
    stale = "def build_info(): return {'torch': '1.0.0'}\ndef built_with_cuda(): return False\n"
    result = import_package_in(tmp_path, _C=stale)
    assert f"built against torch 1.0.0, but this is torch {torch.__version__}" in result.stderr


@pytest.mark.extended
def test_every_smoke_test_is_collected_without_triton():
    plugin = ["-p", "tests.unit.without_triton"]
    command = [sys.executable, "-m", "pytest", *plugin, "-q", "-m", "smoke", "--collect-only", "tests"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "which need Triton" in result.stdout


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
    """Triton, a dependency of torch, and tqdm, which only draws progress bars, are exempt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in project["dependencies"]}
    imports = {path: imported_packages(path) for path in (ROOT / "gpipe_fast").rglob("*.py")}
    # Imported only for a device that launches kernels.
    launching = [*(ROOT / "kernels").glob("*.py"), *(ROOT / "gpipe_fast" / "fuse").rglob("*.py")]
    imports |= {path: imported_packages(path) - {"triton"} for path in launching}
    undeclared = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path, names in imports.items()
        for name in names - declared - {"tqdm"}
    }
    assert undeclared == set()

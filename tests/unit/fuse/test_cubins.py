"""Kernels are compiled once per machine, by a helper process that never outlives the one that asks."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import triton

from gpipe_fast.fuse import compile_helper, cubin, cubins
from gpipe_fast.fuse.compile_helper import job_of
from gpipe_fast.fuse.cubin import CompileFailure, Cubin
from gpipe_fast.lower.launch import NUMBER_TYPES, KernelSource
from tests.unit.fuse import triton_kernels

ROOT = Path(__file__).parents[3]
HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Gives every test an empty cache."""
    monkeypatch.setenv(cubin.FOLDER_VARIABLE, str(tmp_path / "cubins"))
    cubins._memory.clear()
    yield tmp_path / "cubins"
    cubins._memory.clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[KernelSource]:
    """Makes this process compile. Returns what it has compiled."""
    calls: list[KernelSource] = []

    def compile_here(source: KernelSource, *others: Any) -> Cubin | CompileFailure:
        calls.append(source)
        return cubin.compile_here(source, *others)

    monkeypatch.setenv(cubins.WORKERS_VARIABLE, "0")
    monkeypatch.setattr(cubins, "compile_here", compile_here)
    return calls


def source(kernel: Any = triton_kernels.double, block: Any = 64) -> KernelSource:
    signature = (("p_x", "*fp32"), ("p_y", "*fp32"), ("size", "i32"))
    return KernelSource(kernel, signature, (("BLOCK", block),), ("p_x", "p_y"), 4, 1)


def module(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes and imports a module of kernels."""
    (folder / f"{name}.py").write_text(f"import os\nimport triton\nimport triton.language as tl\n{text}")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


KERNEL = (
    "@triton.jit\ndef kernel(p_x, p_y, size, BLOCK: tl.constexpr):\n    tl.store(p_y, tl.load(p_x) + 1)\n"
)
# A module that ends the process that compiles its kernel.
DEADLY = f"""
import multiprocessing
from gpipe_fast.fuse import cubin
compile_kernel = cubin.compile_kernel

def die(source, capability):
    if multiprocessing.parent_process() and source.kernel is kernel:
        os.write(2, b"out of registers\\n")
        os.kill(os.getpid(), 11)
    return compile_kernel(source, capability)

cubin.compile_kernel = die
{KERNEL}"""


def entries(folder: Path) -> list[Path]:
    """Returns the complete entries of the cache."""
    return [path.parent for path in folder.glob("*/__grp__*")]


# Compiling


def test_the_helper_compiles_and_survives_what_kernels_do_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(cubin, "compile_kernel", cubin.compile_kernel)  # the module changes it
    deadly = module(tmp_path, "deadly_kernels", DEADLY, monkeypatch)
    monkeypatch.setenv(cubins.WORKERS_VARIABLE, "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tuned = triton_kernels.tuned.fn  # without its autotuner
    asked = [
        source(deadly.kernel),
        source(triton_kernels.wrong),
        source(),
        source(tuned),
        source(),
        source(block=object()),
        dataclasses.replace(source(), signature=(("p_x", "*fp32"), ("p_y", "*fp32"))),
    ]
    with mock.patch.object(cubins, "compile_here", None):
        died, wrong, double, also, again, refused, untyped = cubins.cubins(asked, HOPPER)
    assert died == CompileFailure(
        "the process that compiled the kernel ended with signal 11 (SIGSEGV) (out of registers)"
    )
    assert isinstance(wrong, CompileFailure)
    assert "arange's range must be a power of 2" in wrong.reason
    assert "\n" not in wrong.reason
    assert isinstance(double, Cubin)
    assert isinstance(also, Cubin)
    assert (double.name, double.num_warps, double.num_ctas, double.shared) == ("double", 4, 1, 0)
    assert double.image.startswith(b"\x7fELF")
    assert again is double
    assert refused == CompileFailure(
        f"constants must be bool, int, float, str or None, got BLOCK = {asked[5].constants[0][1]!r}"
    )
    assert untyped == CompileFailure("arguments without a type or a value: size")
    assert len(entries(folder)) == 2

    # From memory, with failures; then from disk, which keeps cubins alone.
    monkeypatch.setattr(cubins, "_compile", None)
    assert cubins.cubins(asked, HOPPER) == [died, wrong, double, also, again, refused, untyped]
    cubins._memory.clear()
    assert cubins.cubins([source(), source(tuned)], HOPPER) == [double, also]


OTHERS = (
    source(block=128),
    dataclasses.replace(source(), divisible=("p_x",)),
    dataclasses.replace(source(), num_warps=8),
    dataclasses.replace(source(), num_stages=2),
    dataclasses.replace(source(), contracts=False),
    dataclasses.replace(source(), signature=(*source().signature[:2], ("size", "i64"))),
)


def test_every_cubin_is_compiled_once(
    compiled: list[KernelSource], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory and the disk tell apart sources, devices, compilers, and versions of a file."""
    asked = [source(), *OTHERS, source()]
    found = cubins.cubins(asked, HOPPER)
    assert all(isinstance(each, Cubin) for each in found)
    assert len(compiled) == len(entries(folder)) == len(asked) - 1
    assert cubins.cubins(asked, HOPPER) == found
    cubins._memory.clear()
    assert [cubins.cubins([each], HOPPER)[0] for each in asked] == found
    assert len(compiled) == len(asked) - 1
    compiled.clear()
    assert isinstance(cubins.cubins([source(block=64.0)], HOPPER)[0], CompileFailure), "the type differs"
    cubins.cubins([source()], (8, 0))
    cubins._memory.clear()
    with monkeypatch.context() as patched:
        patched.setenv("TRITON_DEFAULT_FP_FUSION", "0")  # Triton compiles other code
        cubins.cubins([source()], HOPPER)
    assert len(compiled) == 3
    for text in (KERNEL, KERNEL.replace("+ 1", "+ 20")):
        kernel = module(tmp_path, "edited_kernels", text, monkeypatch).kernel
        cubins.cubins([source(kernel)], HOPPER)
    assert len(compiled) == 5


def test_a_kernel_that_triton_cannot_hash_is_a_reason(
    tmp_path: Path, compiled: list[KernelSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it has failed, Triton returns a hash that all kernels of one name share."""
    kernel = module(tmp_path, "unhashed_kernels", KERNEL.replace("+ 1", "+ os.getpid()"), monkeypatch).kernel
    for _ in range(2):
        [made] = cubins.cubins([source(kernel)], HOPPER)
        assert isinstance(made, CompileFailure)
        cubins._memory.clear()
    assert not compiled


@pytest.mark.usefixtures("compiled")
def test_arguments_of_every_type_have_the_sizes_of_the_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = (("p_x", "*bf16"), *((f"x_{type_}", type_) for type_ in sorted(NUMBER_TYPES)))
    names = ", ".join(name for name, _ in signature)
    text = f"@triton.jit\ndef kernel({names}):\n    tl.store(p_x, 1.0)\n"
    kernel = module(tmp_path, "kernels_of_every_type", text, monkeypatch).kernel
    [made] = cubins.cubins([KernelSource(kernel, signature, (), (), 4, 1)], HOPPER)
    assert isinstance(made, Cubin), made


def test_parameters_that_launches_do_not_pass_are_a_reason(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    other = dataclasses.replace(source(), signature=(("p_x", "*fp32"), ("p_y", "*fp32"), ("size", "i64")))
    compiled = cubin.compile_kernel(other, 90)
    monkeypatch.setattr(cubin, "compile_kernel", lambda source, capability: compiled)
    assert isinstance(cubin.compile_here(other, 90, str(folder)), Cubin)
    assert cubin.compile_here(source(), 90, str(folder)) == CompileFailure(
        "its parameters' sizes are [8, 8, 8, 8, 8] bytes, but launches pass [8, 8, 4, 8, 8]"
    )


# Names


def test_a_kernel_without_a_name_is_compiled_in_this_process() -> None:
    @triton.jit
    def local(p_x, p_y, size, BLOCK: triton.language.constexpr):
        triton.language.store(p_y, triton.language.load(p_x))

    assert job_of(source(local)) is None
    [made] = cubins.cubins([source(local)], HOPPER)
    assert isinstance(made, CompileFailure if triton.knobs.runtime.interpret else Cubin)


def test_a_job_finds_no_other_version_of_its_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(source(module(tmp_path, "named_kernels", KERNEL, monkeypatch).kernel))
    assert job is not None
    assert job.find() is not None
    monkeypatch.delitem(sys.modules, "named_kernels")
    file = tmp_path / "named_kernels.py"
    file.write_text(f"{file.read_text()}    tl.store(p_y, 1)\n")
    importlib.invalidate_caches()
    assert job.find() is None


# Triton's disk cache


DAMAGES: tuple[tuple[str, Callable[[Path], object]], ...] = (
    ("cubin", lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])),
    ("cubin", lambda path: path.unlink()),
    ("json", lambda path: path.write_bytes(path.read_bytes()[:-1])),
)


def test_a_damaged_entry_is_made_anew(compiled: list[KernelSource], folder: Path) -> None:
    made = cubins.cubins([source()], HOPPER)
    for count, (suffix, damage) in enumerate(DAMAGES, start=2):
        [path] = folder.glob(f"*/double.{suffix}")
        damage(path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                cubins._memory.clear()
                assert cubins.cubins([source()], HOPPER) == made
        assert len(compiled) == count


@pytest.mark.parametrize(
    ("name", "reason"), [("{tmp_path}/file/cubins", ""), ("~/kernels", r" in ~.* no home folder")]
)
def test_a_folder_that_cannot_be_written_warns_once(
    name: str,
    reason: str,
    compiled: list[KernelSource],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container may run as a user that its system does not know."""
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv(cubin.FOLDER_VARIABLE, name.format(tmp_path=tmp_path))
    with (
        mock.patch.object(pwd, "getpwuid", side_effect=KeyError),
        pytest.warns(UserWarning, match=f"cannot be kept{reason}") as caught,
    ):
        made = [cubins.cubins([source(block=block)], HOPPER)[0] for block in (64, 128)]
    assert all(isinstance(each, Cubin) for each in made)
    assert len(caught) == 1
    assert len(compiled) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_the_folder_is_a_variables_or_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/user")
    monkeypatch.setenv(cubin.FOLDER_VARIABLE, "~/kernels")
    assert cubin.cache_folder() == "/home/of/user/kernels"
    monkeypatch.delenv(cubin.FOLDER_VARIABLE)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/kernels/of/triton")
    assert cubin.cache_folder() == "/kernels/of/triton"


# The processes


def helpers(folder: Path) -> list[int]:
    """Returns the helper and its forks, whose temporary files are in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={folder}/gpipe_fast-".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def started(tmp_path: Path, text: str) -> subprocess.Popen[str]:
    """Starts a script that compiles with one worker."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    environment |= {cubins.WORKERS_VARIABLE: "1", "GPIPE_FAST_PROGRESS": "0"}
    return subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)


def test_an_interrupt_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def interrupt(result: Any) -> None:
        assert helpers(tmp_path)
        raise KeyboardInterrupt

    jobs = [job_of(source(block=block)) for block in (64, 128)]
    with pytest.raises(KeyboardInterrupt):
        compile_helper.compile_in_helper(jobs, 90, str(tmp_path / "cubins"), 2, interrupt)  # type: ignore[arg-type]
    assert eventually(lambda: not helpers(tmp_path))
    assert not list(tmp_path.glob("gpipe_fast-*"))


@pytest.mark.parametrize("program", ["raise ImportError", "import os; os.kill(os.getpid(), 9)"])
def test_without_a_helper_this_process_compiles(
    program: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(compile_helper, "_PROGRAM", program)
    [made] = cubins.cubins([source()], HOPPER)
    assert isinstance(made, Cubin)
    assert len(entries(folder)) == 1


COMPILE = """
    from gpipe_fast.fuse.cubin import Cubin
    from gpipe_fast.fuse.cubins import cubins
    from tests.unit.fuse.test_cubins import source
    print("started", flush=True)
    made = cubins([source(block=64 << i) for i in range(8)], (9, 0))
    print(sum(isinstance(each, Cubin) for each in made))
"""


@pytest.mark.extended
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_ends_leaves_no_helper_and_a_usable_cache(
    tmp_path: Path, number: int, folder: Path, compiled: list[KernelSource]
) -> None:
    process = started(tmp_path, COMPILE)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    while not entries(folder):
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(10) != 0
    assert eventually(lambda: not helpers(tmp_path))
    kept = len(entries(folder))
    assert 0 < kept < 8
    found = cubins.cubins([source(block=64 << i) for i in range(8)], HOPPER)
    assert all(isinstance(each, Cubin) for each in found)
    assert len(compiled) == 8 - kept


def test_a_helper_that_is_killed_within_a_reply_leaves_out_its_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = "import os, pickle; os.write(1, pickle.dumps((0, bytes(200_000)))[:1000]); os.abort()"
    monkeypatch.setattr(compile_helper, "_PROGRAM", program)
    found: list[compile_helper.Result] = []
    compile_helper.compile_in_helper([], 90, str(tmp_path), 1, found.append)
    assert found == []

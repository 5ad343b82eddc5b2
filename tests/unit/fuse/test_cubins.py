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
from gpipe_fast.fuse.cubins import CompileFailure, Cubin, KernelSource
from gpipe_fast.lower.launch import NUMBER_TYPES
from tests.unit.fuse import triton_kernels

ROOT = Path(__file__).parents[3]
HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Gives every test an empty cache."""
    monkeypatch.setenv(cubin.FOLDER_VARIABLE, str(tmp_path / "cubins"))
    cubins.forget()
    yield tmp_path / "cubins"
    cubins.forget()


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
    cubins.forget()
    assert cubins.cubins([source(), source(tuned)], HOPPER) == [double, also]


def test_every_cubin_is_compiled_once(compiled: list[KernelSource], folder: Path) -> None:
    asked = [source(), source(block=128), source()]
    found = cubins.cubins(asked, HOPPER)
    assert all(isinstance(each, Cubin) for each in found)
    assert len(compiled) == len(entries(folder)) == 2
    assert cubins.cubins(asked, HOPPER) == found
    cubins.forget()
    assert cubins.cubins(asked, HOPPER) == found
    assert len(compiled) == 2


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(source(triton_kernels.wrong), id="kernel"),
        pytest.param(source(block=64.0), id="type of a constant"),
        pytest.param(dataclasses.replace(source(), divisible=("p_x",)), id="divisible"),
        pytest.param(dataclasses.replace(source(), num_warps=8), id="warps"),
        pytest.param(dataclasses.replace(source(), num_stages=2), id="stages"),
        pytest.param(dataclasses.replace(source(), contracts=False), id="contraction"),
        pytest.param(
            dataclasses.replace(source(), signature=(*source().signature[:2], ("size", "i64"))), id="types"
        ),
    ],
)
def test_sources_that_differ_are_compiled_apart(other: KernelSource, compiled: list[KernelSource]) -> None:
    for asked in (source(), other):
        cubins.cubins([asked], HOPPER)
        cubins.forget()  # the disk must tell them apart, too
    assert len(compiled) == 2


def test_devices_and_compilers_that_differ_have_own_entries(
    compiled: list[KernelSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    cubins.cubins([source()], HOPPER)
    cubins.cubins([source()], (8, 0))
    cubins.forget()
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")  # Triton compiles other code
    cubins.cubins([source()], HOPPER)
    assert len(compiled) == 3


def test_a_kernel_of_an_edited_file_has_an_own_entry(
    tmp_path: Path, compiled: list[KernelSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in (KERNEL, KERNEL.replace("+ 1", "+ 20")):
        kernel = module(tmp_path, "edited_kernels", text, monkeypatch).kernel
        cubins.cubins([source(kernel)], HOPPER)
    assert len(compiled) == 2


def test_a_kernel_that_triton_cannot_hash_is_a_reason(
    tmp_path: Path, compiled: list[KernelSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it has failed, Triton returns a hash that all kernels of one name share."""
    kernel = module(tmp_path, "unhashed_kernels", KERNEL.replace("+ 1", "+ os.getpid()"), monkeypatch).kernel
    for _ in range(2):
        [made] = cubins.cubins([source(kernel)], HOPPER)
        assert isinstance(made, CompileFailure)
        cubins.forget()
    assert not compiled


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
    if triton.knobs.runtime.interpret:
        assert isinstance(made, CompileFailure)
    else:
        assert isinstance(made, Cubin)
        assert made.name == "local"


def test_jobs_lead_to_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = module(tmp_path, "named_kernels", KERNEL, monkeypatch).kernel
    job = job_of(source(kernel))
    assert job is not None
    found = job.find()
    assert found is not None
    assert found.kernel is kernel
    # Another version of it, which must not be taken for this one.
    monkeypatch.delitem(sys.modules, "named_kernels")
    (tmp_path / "named_kernels.py").write_text(
        (tmp_path / "named_kernels.py").read_text() + "    tl.store(p_y, 1)\n"
    )
    importlib.invalidate_caches()
    assert job.find() is None
    # A module that only this process can import.
    monkeypatch.delitem(sys.modules, "named_kernels")
    sys.path.remove(str(tmp_path))
    assert job.find() is None


SCRIPT = """
    import sys
    import triton
    import triton.language as tl
    from gpipe_fast.fuse.cubins import Cubin, KernelSource, cubins
    from tests.unit.fuse.test_cubins import source
    print("run", flush=True)

    @triton.jit
    def kernel(p_x, p_y, size, BLOCK: tl.constexpr):
        tl.store(p_y, tl.load(p_x) + 1)

    print([isinstance(each, Cubin) for each in cubins([source(kernel), source()], (9, 0))])
"""


@pytest.mark.extended
def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    """It defines one kernel itself and imports another, which the helper compiles."""
    done = started(tmp_path, SCRIPT)
    assert done.communicate()[0].splitlines() == ["run", "[True, True]"]


# Triton's disk cache


def only(folder: Path, suffix: str) -> Path:
    [path] = folder.glob(f"*/double.{suffix}")
    return path


def rewrite(suffix: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = only(folder, suffix)
        path.write_bytes(change(path.read_bytes()))

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "an empty image": rewrite("cubin", lambda c: b""),
    "a truncated image": rewrite("cubin", lambda c: c[: len(c) // 2]),
    "no image": lambda folder: only(folder, "cubin").unlink(),
    "an empty description": rewrite("json", lambda c: b""),
    "a truncated description": rewrite("json", lambda c: c[:-1]),
    "no description": lambda folder: only(folder, "json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_made_anew(
    damage: Callable[[Path], object], compiled: list[KernelSource], folder: Path
) -> None:
    made = cubins.cubins([source()], HOPPER)
    damage(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            cubins.forget()
            assert cubins.cubins([source()], HOPPER) == made
    assert len(compiled) == 2


def test_a_folder_that_cannot_be_written_warns_once(
    compiled: list[KernelSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(cubin.FOLDER_VARIABLE, str(tmp_path / "file" / "cubins"))
    with pytest.warns(UserWarning, match="cannot be kept") as caught:
        made = [cubins.cubins([source(block=block)], HOPPER)[0] for block in (64, 128)]
    assert all(isinstance(each, Cubin) for each in made)
    assert len(caught) == 1
    assert len(compiled) == 2


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(cubin.FOLDER_VARIABLE, "~/kernels")
    assert cubin.cache_folder() == str(tmp_path / "kernels")


def test_without_a_variable_the_folder_is_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cubin.FOLDER_VARIABLE)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/kernels/of/triton")
    assert cubin.cache_folder() == "/kernels/of/triton"


def test_without_a_home_folder_nothing_is_kept(
    compiled: list[KernelSource], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A container may run as a user that its system does not know."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv(cubin.FOLDER_VARIABLE, "~/kernels")
    monkeypatch.chdir(tmp_path)
    with (
        mock.patch.object(pwd, "getpwuid", side_effect=KeyError),
        pytest.warns(UserWarning, match="cannot be kept in ~.* no home folder"),
    ):
        [made] = cubins.cubins([source()], HOPPER)
    assert isinstance(made, Cubin)
    assert not list(tmp_path.iterdir())


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


def started(tmp_path: Path, text: str, *words: str) -> subprocess.Popen[str]:
    """Starts a script that compiles with one worker."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    environment |= {cubins.WORKERS_VARIABLE: "1", "GPIPE_FAST_PROGRESS": "0"}
    return subprocess.Popen(
        [sys.executable, script, *words], stdout=subprocess.PIPE, text=True, env=environment
    )


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
    import sys
    from gpipe_fast.fuse.cubins import Cubin, cubins
    from tests.unit.fuse.test_cubins import source
    print("started", flush=True)
    made = cubins([source(block=64 << i) for i in range(int(sys.argv[1]))], (9, 0))
    print(sum(isinstance(each, Cubin) for each in made))
"""


@pytest.mark.extended
def test_two_processes_fill_one_cache(tmp_path: Path, folder: Path, compiled: list[KernelSource]) -> None:
    both = [started(tmp_path, COMPILE, "3") for _ in range(2)]
    assert [process.communicate()[0].split()[-1] for process in both] == ["3", "3"]
    assert len(entries(folder)) == len(list(folder.iterdir())) == 3
    found = cubins.cubins([source(block=64 << i) for i in range(3)], HOPPER)
    assert all(isinstance(each, Cubin) for each in found)
    assert not compiled


@pytest.mark.extended
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_ends_leaves_no_helper_and_a_usable_cache(
    tmp_path: Path, number: int, folder: Path, compiled: list[KernelSource]
) -> None:
    process = started(tmp_path, COMPILE, "8")
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

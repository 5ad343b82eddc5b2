"""Kernels are compiled once per machine, in processes that never outlive their parent."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import triton

from gpipe_fast.fuse import compile_pool, compile_worker, cubin_cache, cubins, kernel_name
from gpipe_fast.fuse.cubins import CompileFailure, Cubin, KernelSource
from gpipe_fast.lower.launch import NUMBER_TYPES
from tests.fuse import triton_kernels

ROOT = Path(__file__).parents[2]
HOPPER = (9, 0)
SOME = Cubin(b"\x7fELF" + bytes(range(256)) * 8, "double", 4, 1, 2048, False, False)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Gives every test an empty cache."""
    monkeypatch.setenv(cubin_cache.FOLDER_VARIABLE, str(tmp_path / "cubins"))
    cubins.forget()
    yield tmp_path / "cubins"
    cubins.forget()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[KernelSource]:
    """Replaces the compiler by one that returns `SOME`, in this process. Returns what it has compiled."""
    calls: list[KernelSource] = []

    def compile_here(source: KernelSource, capability: int) -> Cubin:
        calls.append(source)
        return SOME

    monkeypatch.setenv(compile_pool.WORKERS_VARIABLE, "0")
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


# Compiling


def test_workers_compile_and_survive_what_kernels_do_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    killing = "os.environ.get('KILLED') and os.kill(os.getpid(), 11)\n"
    deadly = module(tmp_path, "deadly_kernels", killing + KERNEL, monkeypatch)
    monkeypatch.setenv("KILLED", "1")
    monkeypatch.setenv(compile_pool.WORKERS_VARIABLE, "1")
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
    died, wrong, double, also, again, refused, untyped = cubins.cubins(asked, HOPPER)
    assert isinstance(died, CompileFailure)
    assert "signal 11 (SIGSEGV)" in died.reason
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
    assert len(list(folder.iterdir())) == 2

    # From memory, with failures; then from disk, which keeps cubins alone.
    monkeypatch.setattr(cubins, "CompilePool", None)
    assert cubins.cubins(asked, HOPPER) == [died, wrong, double, also, again, refused, untyped]
    cubins.forget()
    assert cubins.cubins([source(), source(tuned)], HOPPER) == [double, also]


def test_every_cubin_is_compiled_once(compiled: list[KernelSource], folder: Path) -> None:
    asked = [source(), source(block=128), source()]
    assert cubins.cubins(asked, HOPPER) == [SOME] * 3
    assert len(compiled) == len(list(folder.iterdir())) == 2
    cubins.cubins(asked, HOPPER)
    cubins.forget()
    cubins.cubins(asked, HOPPER)
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
def test_sources_that_differ_have_own_entries(other: KernelSource, compiled: list[KernelSource]) -> None:
    cubins.cubins([source(), other], HOPPER)
    assert len(compiled) == 2


def test_devices_and_compilers_that_differ_have_own_entries(
    compiled: list[KernelSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    cubins.cubins([source()], HOPPER)
    cubins.cubins([source()], (8, 0))
    monkeypatch.setattr(triton, "__version__", "99.0.0")
    monkeypatch.setattr(cubins, "_compilers", {})
    cubins.cubins([source()], HOPPER)
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")  # Triton compiles other code
    cubins.cubins([source()], HOPPER)
    assert len(compiled) == 4


def test_a_kernel_of_an_edited_file_has_an_own_entry(
    tmp_path: Path, compiled: list[KernelSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in (KERNEL, KERNEL.replace("+ 1", "+ 20")):
        kernel = module(tmp_path, "edited_kernels", text, monkeypatch).kernel
        cubins.cubins([source(kernel)], HOPPER)
    assert len(compiled) == 2


def test_arguments_of_every_type_have_the_sizes_of_the_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = (("p_x", "*bf16"), *((f"x_{type_}", type_) for type_ in sorted(NUMBER_TYPES)))
    names = ", ".join(name for name, _ in signature)
    text = f"@triton.jit\ndef kernel({names}):\n    tl.store(p_x, 1.0)\n"
    kernel = module(tmp_path, "kernels_of_every_type", text, monkeypatch).kernel
    [made] = cubins.cubins([KernelSource(kernel, signature, (), (), 4, 1)], HOPPER)
    assert isinstance(made, Cubin), made


def test_parameters_that_launches_do_not_pass_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    other = dataclasses.replace(source(), signature=(("p_x", "*fp32"), ("p_y", "*fp32"), ("size", "i64")))
    compiled = compile_worker.compile_kernel(other, 90)
    monkeypatch.setattr(compile_worker, "compile_kernel", lambda source, capability: compiled)
    assert isinstance(compile_worker.compile_here(other, 90), Cubin)
    assert compile_worker.compile_here(source(), 90) == CompileFailure(
        "its parameters' sizes are [8, 8, 8, 8, 8] bytes, but launches pass [8, 8, 4, 8, 8]"
    )


# Names


def test_a_kernel_without_a_name_is_compiled_in_this_process() -> None:
    @triton.jit
    def local(p_x, p_y, size, BLOCK: triton.language.constexpr):
        triton.language.store(p_y, triton.language.load(p_x))

    assert kernel_name.name_of(local) is None
    [made] = cubins.cubins([source(local)], HOPPER)
    if triton.knobs.runtime.interpret:
        assert isinstance(made, CompileFailure)
    else:
        assert isinstance(made, Cubin)
        assert made.name == "local"


def test_names_lead_to_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = module(tmp_path, "named_kernels", KERNEL, monkeypatch).kernel
    name = kernel_name.name_of(kernel)
    assert name is not None
    assert kernel_name.find(name) is kernel
    # A module that only its file leads to.
    monkeypatch.delitem(sys.modules, "named_kernels")
    sys.path.remove(str(tmp_path))
    assert kernel_name.find(name).fn.__code__ == kernel.fn.__code__
    # Another version of it.
    monkeypatch.delitem(sys.modules, "named_kernels")
    (tmp_path / "named_kernels.py").write_text(
        (tmp_path / "named_kernels.py").read_text() + "    tl.store(p_y, 1)\n"
    )
    with pytest.raises(kernel_name.KernelNotFoundError, match="has changed since"):
        kernel_name.find(name)


@pytest.mark.parametrize("guarded", [True, False])
def test_a_script_is_only_imported_if_it_expects_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    guard = "if __name__ == '__main__':\n    RUN = True\n" if guarded else ""
    (tmp_path / "script.py").write_text(f"import triton\nimport triton.language as tl\n{KERNEL}{guard}")
    spec = importlib.util.spec_from_file_location("__main__", tmp_path / "script.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    script.__spec__ = None  # as Python sets it for a script
    monkeypatch.setitem(sys.modules, "__main__", script)
    spec.loader.exec_module(script)
    name = kernel_name.name_of(script.kernel)
    if not guarded:
        assert name is None
        return
    assert name is not None
    assert kernel_name.find(name).fn.__code__ == script.kernel.fn.__code__
    assert not hasattr(sys.modules[name.module], "RUN")
    monkeypatch.delitem(sys.modules, name.module)


# The cache on disk


def entry(folder: Path) -> Path:
    [path] = folder.glob("*.cubin")
    return path


def with_header(contents: bytes, **changes: Any) -> bytes:
    """Returns an entry with other fields and a correct checksum."""
    _, header, image = contents.split(b"\n", 2)
    rest = json.dumps({**json.loads(header), **changes}).encode() + b"\n" + image
    return hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return damage


def flip(position: int) -> Callable[[bytes], bytes]:
    return lambda c: c[:position] + bytes([c[position] ^ 1]) + c[position + 1 :]


DAMAGES = {
    "empty": rewrite(lambda c: b""),
    "truncated": rewrite(lambda c: c[:-1]),
    "longer": rewrite(lambda c: c + b"0"),
    "no header": rewrite(lambda c: c[:65]),
    "a bit of the checksum": rewrite(flip(3)),
    "a bit of the header": rewrite(lambda c: c.replace(b'"shared": 2048', b'"shared": 2049')),
    "a bit of the image": rewrite(flip(-10)),
    "another format": rewrite(lambda c: with_header(c, format=99)),
    "another key": rewrite(lambda c: with_header(c, key="0" * 64)),
    "another size": rewrite(lambda c: with_header(c, size=1)),
    "a wrong type": rewrite(lambda c: with_header(c, num_warps="4")),
    "no JSON": rewrite(lambda c: b"\xff\x00\n" * 3),
    "a pickle": rewrite(lambda c: b"\x80\x04cos\nsystem\n"),
    "a directory": replace_by(Path.mkdir),
    "a pipe": replace_by(os.mkfifo),
    "a dangling link": replace_by(lambda path: path.symlink_to("nowhere")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_made_anew(
    damage: Callable[[Path], None], compiled: list[KernelSource], folder: Path
) -> None:
    cubins.cubins([source()], HOPPER)
    path, written = entry(folder), entry(folder).read_bytes()
    damage(path)
    cubins.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cubins.cubins([source()], HOPPER) == [SOME]
    assert len(compiled) == 2
    assert entry(folder).read_bytes() == written
    assert not path.is_symlink()
    assert len(list(folder.iterdir())) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_entry_is_made_anew(compiled: list[KernelSource], folder: Path) -> None:
    cubins.cubins([source()], HOPPER)
    entry(folder).chmod(0)
    cubins.forget()
    assert cubins.cubins([source()], HOPPER) == [SOME]
    assert len(compiled) == 2


def test_a_folder_that_cannot_be_written_warns_once(
    compiled: list[KernelSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(cubin_cache.FOLDER_VARIABLE, str(tmp_path / "file" / "cubins"))
    with pytest.warns(UserWarning, match="cannot be kept") as caught:
        assert cubins.cubins([source(), source(block=128)], HOPPER) == [SOME] * 2
    assert len(caught) == 1


def test_the_folder_keeps_what_was_used_last(folder: Path) -> None:
    for index, name in enumerate("abc"):
        cubin_cache.store(name, SOME)
        os.utime(folder / f"{name}.cubin", (index, index))
    abandoned = folder / "x.partial"
    abandoned.touch()
    os.utime(abandoned, (0, 0))
    assert cubin_cache.load("a") == SOME  # now the one that was used last
    size = (folder / "a.cubin").stat().st_size
    cubin_cache.trim(2 * size)
    assert sorted(path.name for path in folder.iterdir()) == ["a.cubin", "c.cubin"]


# The processes


def processes(text: str) -> list[int]:
    """Returns the processes whose command line contains a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_an_interrupt_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt), compile_pool.CompilePool(2):
        # Linux knows a command line shortly after the process has started.
        assert eventually(lambda: len(processes(str(tmp_path))) == 2)
        raise KeyboardInterrupt
    assert not processes(str(tmp_path))
    assert not list(tmp_path.glob("gpipe_fast-*"))


def test_workers_that_cannot_start_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compile_pool.WORKERS_VARIABLE, "2")
    monkeypatch.setattr(compile_pool, "_PROGRAM", "raise ImportError('no such library')")
    [made] = cubins.cubins([source()], HOPPER)
    assert isinstance(made, CompileFailure)
    assert "could start" in made.reason
    assert "no such library" in made.reason


COMPILE = """
    import sys
    from gpipe_fast.fuse.cubins import Cubin, KernelSource, cubins
    from tests.fuse import triton_kernels
    from tests.fuse.test_cubins import source
    if __name__ == "__main__":
        print("started", flush=True)
        made = cubins([source(block=64 << i) for i in range(int(sys.argv[1]))], (9, 0))
        print(sum(isinstance(each, Cubin) for each in made))
"""


def compiling(tmp_path: Path, count: int) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(COMPILE))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    environment[compile_pool.WORKERS_VARIABLE] = "1"
    return subprocess.Popen(
        [sys.executable, script, str(count)], stdout=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.extended
def test_two_processes_fill_one_cache(tmp_path: Path, folder: Path) -> None:
    both = [compiling(tmp_path, 3) for _ in range(2)]
    assert [process.communicate()[0].split()[-1] for process in both] == ["3", "3"]
    assert len(list(folder.glob("*.cubin"))) == len(list(folder.iterdir())) == 3


@pytest.mark.extended
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_ends_leaves_no_worker_and_a_usable_cache(
    tmp_path: Path, number: int, folder: Path
) -> None:
    process = compiling(tmp_path, 8)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    while not list(folder.glob("*.cubin")):
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(10) != 0
    # A worker ends by becoming a process that deletes the folder; between the two it has no command line.
    assert eventually(lambda: not list(tmp_path.glob("gpipe_fast-*")))
    assert eventually(lambda: not processes(f"{tmp_path}/gpipe_fast-"))
    kept = list(folder.glob("*.cubin"))
    assert 0 < len(kept) < 8
    assert all(cubin_cache.load(path.stem) for path in kept)

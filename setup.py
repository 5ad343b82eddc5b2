"""Builds gpipe_fast._C with or without CUDA: the toolkit and torch decide, never a visible GPU."""

import contextlib
import os
import re
import shutil
import sys
import sysconfig
import threading
from glob import glob
from pathlib import Path

from setuptools import setup

# The GPU architecture to compile for if torch does not report those that it was built for.
DEFAULT_ARCH = "8.0"
# The oldest architecture for which nvcc accepts the kernels: their arguments are __grid_constant__.
MIN_ARCH = (7, 0)


def find_toolkit():
    """Returns the root and version of the CUDA toolkit, or (None, None).

    An nvcc without CUDA headers beside it is a wrapper, not a toolkit.
    """
    nvcc = shutil.which("nvcc")
    beside_nvcc = Path(nvcc).resolve().parents[1] if nvcc else None
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), beside_nvcc, "/usr/local/cuda"):
        header = Path(root or "") / "include" / "cuda.h"
        if root and header.exists() and (Path(root) / "bin" / "nvcc").exists():
            version = int(re.search(r"#define CUDA_VERSION (\d+)", header.read_text())[1])
            return str(root), f"{version // 1000}.{version % 1000 // 10}"
    return None, None


def choose_cuda(request, torch_cuda, toolkit):
    """Returns whether to build with CUDA, and the reason.

    `request` is the value of GPIPE_FAST_CUDA, '' if unset; `torch_cuda` and `toolkit` are versions or None.
    """
    found = f"torch built with CUDA: {torch_cuda or 'no'}, CUDA toolkit: {toolkit or 'not found'}"
    usable = bool(torch_cuda and toolkit and torch_cuda.split(".")[0] == toolkit.split(".")[0])
    if request not in ("", "0", "1"):
        raise SystemExit(f"GPIPE_FAST_CUDA must be 0 or 1, but is {request!r}")
    if request == "1" and not usable:
        raise SystemExit(
            f"GPIPE_FAST_CUDA=1 needs a torch and a toolkit of the same major CUDA version; found {found}"
        )
    return usable and request != "0", f"GPIPE_FAST_CUDA={request}, {found}" if request else found


def choose_archs(requested, visible, torch_flags):
    """Returns the GPU architectures to compile for, and the reason; those below MIN_ARCH are left out.

    `visible` lists the compute capabilities of the visible GPUs; `torch_flags` lists the architectures that
    torch was built for, such as "sm_80 sm_90 compute_90". An extension built without a visible GPU has code
    for the oldest of them, which the driver of a later one compiles when the extension is loaded.
    """
    numbers = sorted({int(number) for number in re.findall(r"\bsm_([0-9]+)\b", torch_flags or "")})
    reason = "TORCH_CUDA_ARCH_LIST"
    if requested:
        archs = re.split(r"[;\s]+", requested.strip())
    elif visible:
        archs, reason = sorted({f"{major}.{minor}" for major, minor in visible}), "the visible GPUs"
    else:
        known = [f"{n // 10}.{n % 10}" for n in numbers]
        oldest = next((arch for arch in known if not is_too_old(arch)), *known[-1:] or [DEFAULT_ARCH])
        archs, reason = [f"{oldest}+PTX"], "the oldest of torch, since no GPU is visible"
    too_old = [arch for arch in archs if is_too_old(arch)]
    if too_old:
        least = f"the kernels need compute capability {MIN_ARCH[0]}.{MIN_ARCH[1]}"
        if len(too_old) == len(archs):
            raise SystemExit(
                f"{least}, but found only {' '.join(archs)} ({reason}): set TORCH_CUDA_ARCH_LIST, or "
                "GPIPE_FAST_CUDA=0 to build for the CPU"
            )
        reason += f"; left out: {' '.join(too_old)}, because {least}"
    return ";".join(arch for arch in archs if arch not in too_old), reason


def is_too_old(arch):
    """Returns whether an architecture, such as "6.0+PTX", is below MIN_ARCH; not known for names."""
    version = re.match(r"(\d+)\.(\d+)", arch)
    return bool(version) and (int(version[1]), int(version[2])) < MIN_ARCH


@contextlib.contextmanager
def shortened_ninja_output():
    """Shortens ninja's output for each command, "[3/37] c++ ...", to the name of the compiled file.

    pip shows no output of a build that succeeds, so these lines go to its terminal, too.
    """
    sys.stdout.flush()
    shown = None
    if not sys.stdout.isatty():
        with contextlib.suppress(OSError):  # there is no terminal
            shown = os.fdopen(os.open("/dev/tty", os.O_WRONLY), "w")
    terminal, (read, write) = os.dup(1), os.pipe()

    def copy():
        with os.fdopen(read, errors="replace") as lines, os.fdopen(terminal, "w") as out:
            for line in lines:
                compiled = re.match(r"(\[[0-9]+/[0-9]+\]) .* -c (\S+\.(?:cpp|cu))\b", line)
                short = f"{compiled[1]} {os.path.relpath(compiled[2])}\n" if compiled else line
                for each in filter(None, (out, shown if compiled else None)):
                    each.write(short)
                    each.flush()

    thread = threading.Thread(target=copy)
    thread.start()
    os.dup2(write, 1)
    os.close(write)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(terminal, 1)  # closes the pipe, so that the thread ends and closes `terminal`
        thread.join()
        if shown:
            shown.close()


def build_arguments():
    """Returns the `ext_modules` and `cmdclass` arguments of setup()."""
    # pip installs ninja beside the interpreter, in a folder that is on PATH only in an activated environment.
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    try:
        import torch
    except ImportError as error:
        raise SystemExit(
            "gpipe_fast must be built against the torch that will run it: install torch, then run "
            f"`pip install --no-build-isolation .` ({error})"
        ) from error
    toolkit, version = find_toolkit()
    if toolkit:  # must be set before importing cpp_extension, whose search accepts any nvcc on PATH
        os.environ["CUDA_HOME"] = toolkit
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    cuda, reason = choose_cuda(os.environ.get("GPIPE_FAST_CUDA", ""), torch.version.cuda, version)
    cuda_sources = set(glob("csrc/cuda/*"))
    sources, macros = sorted(set(glob("csrc/*/*.cpp")) - cuda_sources), []
    if torch.distributed.is_available():  # else its headers declare nothing, and stages stay in one process
        macros += [("USE_DISTRIBUTED", "1"), ("USE_C10D", "1")]
    # No contraction to fused multiply-add, so that random draws are bitwise equal on CUDA and the CPU.
    nvcc = ["-O3", "--fmad=false"]
    flags = {"cxx": ["-O3", "-g0", "-Wall", "-fvisibility=hidden", "-fopenmp"], "nvcc": nvcc}
    if cuda:
        visible = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
        archs, choice = choose_archs(
            os.environ.get("TORCH_CUDA_ARCH_LIST"), visible, getattr(torch._C, "_cuda_getArchFlags", str)()
        )
        os.environ["TORCH_CUDA_ARCH_LIST"] = archs
        sources += sorted(path for path in cuda_sources if path.endswith((".cpp", ".cu")))
        macros += [("GPIPE_FAST_CUDA", "1"), ("GPIPE_FAST_CUDA_ARCHS", archs)]
        # NVIDIA's wheels have the headers of the math libraries; with -isystem the toolkit's take precedence.
        wheels = Path(torch.__file__).parents[1] / "nvidia" / f"cu{version.split('.')[0]}" / "include"
        for compiler in flags.values():
            compiler += ["-isystem", str(wheels)]
    print(f"gpipe_fast: building {f'with CUDA for {archs} ({choice})' if cuda else 'for the CPU'}; {reason}")
    headers = sorted(glob("csrc/**/*.h", recursive=True))
    extension = (CUDAExtension if cuda else CppExtension)(
        "gpipe_fast._C",
        sources,
        define_macros=macros,
        extra_compile_args=flags,
        depends=headers,
        include_dirs=[str(Path("csrc").resolve())],
    )

    class Build(BuildExtension):
        def build_extensions(self):
            with shortened_ninja_output():
                super().build_extensions()

    return {"ext_modules": [extension], "cmdclass": {"build_ext": Build}}


if __name__ == "__main__":
    setup(**build_arguments())

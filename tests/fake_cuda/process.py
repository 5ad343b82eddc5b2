"""Runs programs of this folder in processes of their own on the fake CUDA runtime."""

from __future__ import annotations

from pathlib import Path

from tests.programs import ROOT, by_hand, run_python

FOLDER = Path(__file__).parent


def run(
    program: str,
    libraries: tuple[Path, Path],
    *words: str,
    limit: float = 300,
    interpreted: bool = False,
    fused: bool = False,
    **variables: object,
) -> list[str]:
    """Runs a program, and returns the lines that it prints.

    Args:
        program: The file name of the program, in this folder.
        libraries: The runtime and the operators.
        words: The program's arguments after OPERATORS.
        limit: The time limit in seconds.
        interpreted: Whether Triton interprets kernels.
        fused: Whether stages use fused kernels, whose bits differ from the plain loop's.
        variables: Variables of the fake runtime: `log` is FAKE_CUDA_LOG.
    """
    runtime, operators = libraries
    runtime_variables = {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in variables.items()}
    runtime_variables["LD_PRELOAD"] = str(runtime)
    runtime_variables["GPIPE_FAST_DISABLE"] = "" if fused else "fuse"
    runtime_variables["GPIPE_FAST_MIN_REGION_BYTES"] = "0"
    runtime_variables["GPIPE_FAST_CACHE"] = str(ROOT / "build" / "tests" / "cubins")
    if "scarce" in variables:  # every tensor is allocated by the runtime
        runtime_variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if interpreted:
        runtime_variables["TRITON_INTERPRET"] = "1"
    arguments = (str(FOLDER / program), str(operators), *words)
    done = run_python(*arguments, warning="ignore", timeout=limit, **runtime_variables)
    repeat = by_hand(done, **runtime_variables)
    assert done.returncode == 0, f"{repeat}\n{done.stdout}{done.stderr[-3000:]}"
    return done.stdout.splitlines()

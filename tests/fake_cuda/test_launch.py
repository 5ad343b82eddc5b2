"""Programs that launch kernels, on the fake CUDA runtime: which kernels are launched, when, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fake_cuda import launch_cases
from tests.fake_cuda.race_detector import Line


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with compiled kernels, and with the other arguments of `Kernel` as JSON."""
    triton = pytest.importorskip("triton")
    from tests.fake_cuda.launched_kernels import scale, scale_unaligned

    folder = tmp_path_factory.mktemp("kernels")
    signature = {"x": "*fp32", "y": "*fp32", "count": "i32", "factor": "fp32", "SIZE": "constexpr"}
    for function, divisible in ((scale, (0, 1)), (scale_unaligned, ())):
        attributes = {(index,): [["tt.divisibility", 16]] for index in divisible}
        source = triton.compiler.ASTSource(function, signature, {"SIZE": launch_cases.BLOCK}, attributes)
        target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
        made = triton.compile(source, target=target, options={"num_warps": 4})
        found = made.metadata
        arguments = {
            "name": found.name,
            "num_threads": 32 * found.num_warps,
            "num_ctas": found.num_ctas,
            "shared_bytes": found.shared,
            "cooperative": found.launch_cooperative_grid,
            "launch_pdl": found.launch_pdl,
        }
        (folder / f"{found.name}.json").write_text(json.dumps(arguments))
        (folder / f"{found.name}.cubin").write_bytes(made.asm["cubin"])
    return folder


def launched(lines: list[Line]) -> list[list[str]]:
    """Returns the names of the kernels that were launched between each pair of marks, "begin" and "end"."""
    found: list[list[str]] = []
    inside = False
    for line in lines:
        if line.kind == "mark" and line.words[0] in ("begin", "end"):
            inside = line.words[0] == "begin"
            found += [[]] if inside else []
        elif line.kind == "kernel" and inside:
            found[-1].append(line.words[1])
    return found


def test_launches(logged: Callable[..., list[Line]], kernels: Path) -> None:
    """Runs cases, and compares the kernels that each launches between its marks."""
    expected = {
        "aligned_and_unaligned": [["scale"], *[["scale_unaligned"]] * 3],
        "empty_grids": [[], [], []],
        "other_current_device": [["scale"]],
        "wrong_launches": [],
        "checks_wait_for_the_end_of_a_capture": [["scale"]],
    }
    lines = logged("launch_cases.py", str(kernels), *expected, expected=[*expected])
    assert launched(lines) == [found for of_case in expected.values() for found in of_case]


def test_replays_launch_while_the_gil_is_held(logged: Callable[..., list[Line]], kernels: Path) -> None:
    """At least one attempt acquires the GIL before the first launch."""
    case = "replays_launch_while_the_gil_is_held"
    lines = logged("launch_cases.py", str(kernels), case, expected=[case])
    found = launched(lines)
    num_forward, num_backward = max(map(len, found[::2])), max(map(len, found[1::2]))
    assert num_forward == 2 * launch_cases.CHUNKS, "each stage, for each micro-batch"
    assert num_backward == launch_cases.CHUNKS, "stage 1, which returns a boundary gradient"
    num_libraries = sum(line.kind == "mark" and line.words[0] == "library" for line in lines)
    assert num_libraries == 4, "two kernels on each device, whatever the number of programs"

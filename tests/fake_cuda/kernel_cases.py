"""Kernels on the fake runtime, in Triton's interpreter; run by test_kernels.py.

`kernel_cases.py OPERATORS CASES`: loads the operators, runs each case (``limits/captured/..``) and prints
"equal".
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from gpipe_fast.kernels.launch import Config
from tests.fake_cuda import sample_kernels
from tests.fake_cuda.launch_kernels import (
    DEFAULT_SHARED_BYTES,
    SUCCESS,
    Launcher,
    LoadedKernel,
    launching_natively,
)
from tests.unit.kernels.numerics import test_cross_entropy, test_linear_cross_entropy, test_stage_launchers

SIZE, COUNT = 64, 150
CONFIG = Config({"SIZE": SIZE})
NUM_PROGRAMS = -(-COUNT // SIZE)
MAX_SHARED_BYTES = 227 * 1024
COPIES = [("p_x", "*fp32"), ("p_y", "*fp32"), ("count", "i32")]

# Errors of the CUDA runtime.
INVALID_VALUE, INVALID_CONFIGURATION = 1, 9
INVALID_KERNEL_IMAGE, NO_KERNEL_IMAGE_FOR_DEVICE = 200, 209
SYMBOL_NOT_FOUND = 500
CAPTURE_UNSUPPORTED = 900


def scale(launch: Launcher, x: Tensor, factor: float) -> Tensor:
    y = torch.empty_like(x)
    launch(sample_kernels.scale, (NUM_PROGRAMS,), CONFIG, x, y, COUNT, factor)
    return y


def add_in_place(launch: Launcher, x: Tensor, y: Tensor) -> None:
    launch(sample_kernels.add_in_place, (NUM_PROGRAMS,), CONFIG, x, y, COUNT)


def numbers(seed: int) -> Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed))


def limits(launch: Launcher) -> None:
    """The runtime refuses what the driver refuses."""
    loaded, compiled = launch.load(
        sample_kernels.scale, [*COPIES, ("factor", "fp32")], {"SIZE": SIZE}, Config({})
    )
    x = numbers(0).cuda()
    arguments = [
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int(0),
        ctypes.c_float(0),
    ]

    def status(grid: tuple[int, ...] = (1,), threads: int = 128, shared_bytes: int = 0) -> int:
        return loaded.launch(grid, threads, shared_bytes, arguments)

    assert status() == SUCCESS
    for grid in ((0,), (1, 0), (1, 65536), (1, 1, 65536)):
        assert status(grid) == INVALID_CONFIGURATION, grid
    assert status(threads=2048) == status(threads=0) == INVALID_CONFIGURATION
    assert status(threads=64) == INVALID_VALUE  # the cubin requires 128
    assert status(shared_bytes=DEFAULT_SHARED_BYTES) == SUCCESS
    assert status(shared_bytes=DEFAULT_SHARED_BYTES + 1) == INVALID_VALUE
    assert loaded.allow_shared_bytes(MAX_SHARED_BYTES) == SUCCESS
    assert status(shared_bytes=MAX_SHARED_BYTES) == SUCCESS
    assert loaded.allow_shared_bytes(MAX_SHARED_BYTES + 1) == INVALID_VALUE
    assert status(shared_bytes=MAX_SHARED_BYTES + 1) == INVALID_VALUE

    assert LoadedKernel(compiled, "another").load_status == SYMBOL_NOT_FOUND
    assert LoadedKernel(compiled._replace(image=bytes(64))).load_status == INVALID_KERNEL_IMAGE
    of_another_gpu = bytearray(compiled.image)
    of_another_gpu[48] = 80  # the flags of the ELF header
    refused = LoadedKernel(compiled._replace(image=bytes(of_another_gpu)))
    assert refused.load_status == NO_KERNEL_IMAGE_FOR_DEVICE
    loaded.runtime.cudaGetLastError()  # clears the error


def loading_in_a_capture(launch: Launcher) -> None:
    """A kernel must be loaded on its device before a capture."""
    loaded, compiled = launch.load(
        sample_kernels.scale, [*COPIES, ("factor", "fp32")], {"SIZE": SIZE}, Config({})
    )
    again = LoadedKernel(compiled)
    x = numbers(0).cuda()
    arguments = [
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int(0),
        ctypes.c_float(0),
    ]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        assert loaded.launch((1,), 128, 0, arguments) == SUCCESS
        assert again.launch((1,), 128, 0, arguments) == CAPTURE_UNSUPPORTED
        try:
            graph.capture_end()
        except torch.AcceleratorError:
            return
    raise AssertionError("the capture succeeded")


def one_stream(launch: Launcher) -> None:
    """Kernels and operators of one stream run in order."""
    x = numbers(0)
    y = scale(launch, x.cuda(), 2.0)
    add_in_place(launch, y + 1, y)
    event = torch.cuda.Event()
    event.record()
    while not event.query():  # torch holds Python's lock in the query, and the kernels need it
        pass
    assert torch.equal(y.cpu(), 2 * x + (2 * x + 1))


def two_streams(launch: Launcher) -> None:
    """A stream that waits for another's kernel reads its results."""
    assert all(uses_two_streams(launch, seed, waits=True) for seed in range(5))


def missing_wait(launch: Launcher) -> None:
    """Without the wait, deferred work gives wrong results, and otherwise the log has a race."""
    results = [uses_two_streams(launch, seed, waits=False) for seed in range(20)]
    deferring = bool(ctypes.CDLL(None).fake_cuda_deferring())
    assert all(results) != deferring, results


def uses_two_streams(launch: Launcher, seed: int, waits: bool) -> bool:
    x = numbers(seed)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    given = x.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        y = scale(launch, given, 2.0)
    if waits:
        second.wait_stream(first)
    with torch.cuda.stream(second):
        z = scale(launch, y, 0.5)
    torch.cuda.synchronize()
    return torch.equal(z.cpu(), x)


def two_threads(launch: Launcher) -> None:
    """Two threads launch at once, on devices of their own."""
    for device in range(2):
        with torch.cuda.device(device):
            scale(launch, numbers(0).cuda(), 2.0)  # loads the kernel
    results: dict[int, bool] = {}

    def run(device: int) -> None:
        with torch.cuda.device(device):
            x = numbers(device)
            y = x.cuda()
            for _ in range(4):
                y = scale(launch, y, 2.0)
            results[device] = torch.equal(y.cpu(), 16 * x)

    threads = [threading.Thread(target=run, args=(device,)) for device in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: True, 1: True}


def captured(launch: Launcher) -> None:
    """Every replay runs the kernels on the data of the moment; the capture itself computes nothing."""
    x, total = numbers(0).cuda(), torch.zeros(COUNT).cuda()
    expected = torch.zeros(COUNT)
    add_in_place(launch, scale(launch, torch.zeros_like(x), 2.0), total.clone())  # loads both kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = scale(launch, x, 2.0)
        add_in_place(launch, y + 1, total)
    torch.cuda.synchronize()
    assert y.isnan().all()
    assert torch.equal(total.cpu(), expected)
    for seed in range(3):
        x.copy_(numbers(seed))
        graph.replay()
        expected += 2 * numbers(seed) + 1
        assert torch.equal(y.cpu(), 2 * numbers(seed))
        assert torch.equal(total.cpu(), expected)


def bf16(launch: Launcher) -> None:
    """Arithmetic on bf16, and stores of fp32 as bf16, have the bits of PyTorch."""
    x, y = (1e3 * torch.randn(2, COUNT)).bfloat16()
    found = torch.empty(4, COUNT, dtype=torch.bfloat16, device="cuda")
    launch(sample_kernels.bf16_arithmetic, (NUM_PROGRAMS,), CONFIG, x.cuda(), y.cuda(), found, COUNT)
    expected = torch.stack([x + y, x * y, x.maximum(y), torch.where(x < y, x, y)])
    assert torch.equal(found.cpu(), expected)
    wide, narrow = numbers(1), torch.empty(COUNT, dtype=torch.bfloat16, device="cuda")
    launch(sample_kernels.scale, (NUM_PROGRAMS,), CONFIG, wide.cuda(), narrow, COUNT, 3.0)
    assert torch.equal(narrow.cpu(), (3 * wide).bfloat16())


def failing(launch: Launcher) -> None:
    """A kernel that fails to run makes all later calls fail, and the process too."""
    x = numbers(0).cuda()
    loaded, _ = launch.load(sample_kernels.not_interpretable, COPIES, {"SIZE": 256}, Config({}))
    pointer = ctypes.c_void_p(x.data_ptr())
    loaded.launch((1,), 128, 0, [pointer, pointer, ctypes.c_int(COUNT)])
    try:
        torch.cuda.synchronize()
    except torch.AcceleratorError:
        return
    raise AssertionError("the runtime did not report the failure")


FAMILIES: dict[str, tuple[Callable[..., None], tuple[object, ...]]] = {
    "cross-entropy": (
        test_cross_entropy.test_cross_entropy_matches_pytorch_for_every_width,
        ({"reduction": "sum", "label_smoothing": 0.1}, 100, torch.bfloat16),
    ),
    "cross-entropy of long rows": (
        test_cross_entropy.test_cross_entropy_of_the_widest_rows_matches_pytorch,
        (32769, torch.bfloat16),
    ),
    "linear cross-entropy": (
        test_linear_cross_entropy.test_linear_cross_entropy_matches_pytorch_for_every_chunk_size,
        (22, torch.float32),
    ),
    "rotary": (
        test_stage_launchers.test_rotate_half_matches_pytorch,
        ((torch.bfloat16, torch.float32), 6, 2),
    ),
    "stack": (test_stage_launchers.test_stacked_parts_and_their_sums_match_pytorch, (5, True)),
}
ALL_KERNELS = {
    "cross_entropy._whole_rows", "cross_entropy._long_rows", "precomputed_gradient._scale",
    "partial_sums._add_partials", "rotate_half._rotate_half", "stack._stack",
}  # fmt: skip


def families(launch: Launcher) -> None:
    """Every kernel of gpipe_fast.kernels has results within the bounds of its tests."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name, (comparison, arguments) in FAMILIES.items():
        with torch.device("cuda"):
            try:
                comparison(*arguments)
            except Exception as error:
                raise AssertionError(name) from error
    assert launch.launched == ALL_KERNELS, launch.launched ^ ALL_KERNELS


def main(operators: str, cases: str) -> None:
    torch.ops.load_library(operators)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with launching_natively() as launch:
        for case in cases.split("/"):
            globals()[case](launch)
    print("equal")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Programs that launch kernels on fake devices; run by test_launch.py.

`launch_cases.py OPERATORS KERNELS CASE...`: runs functions of this file by name, and prints the name of each.
KERNELS is the folder that test_launch.py has filled with compiled kernels. The log says which were launched.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast._extension import Arena, Kernel, Layout, Program, Value
from gpipe_fast.lower import program as program_module
from tests.fake_cuda.fake_devices import load
from tests.internals import pipeline_of
from tests.unit.csrc.test_no_interpreter import C, native_calls, no_thread_switches

DEVICE, OTHER_DEVICE = torch.device("cuda:1"), torch.device("cuda:2")
KERNELS = Path(sys.argv[2]) if __name__ == "__main__" else Path()
SIZE, CHUNKS, ATTEMPTS = 64, 4, 3
MAX = 2**31 - 1
GRID, BLOCK = (2, 1, 1), 32
ALIGNED = [0, 1]  # the positions of tensors
Arguments = Sequence[Value | bytes]


def kernel(file: str, device: torch.device = DEVICE, **changes: Any) -> Kernel:
    """Loads a compiled kernel; `changes` are arguments that differ from what the compiler returned."""
    compiled = json.loads((KERNELS / f"{file}.json").read_text())
    return Kernel(**{"image": image(file), "device": device} | compiled | changes)


def image(file: str) -> bytes:
    return (KERNELS / f"{file}.cubin").read_bytes()


def launch_arguments(x: int, y: int) -> list[Value | bytes]:
    return [Value(x), Value(y), struct.pack("i", SIZE), struct.pack("f", 2.0)]


def launching_program(
    grid: tuple[int, int, int] = GRID,
    arguments: Callable[[int, int], Arguments] = launch_arguments,
    device: torch.device = DEVICE,
) -> Program:
    """Returns a program that launches `scale`, or `scale_unaligned`, from its input to its result."""
    program, layout = Program(Arena(), DEVICE), Layout([SIZE], [1], torch.float32)
    x, y = program.add_input(layout), program.add_arena(0, layout)
    program.add_launch(
        kernel("scale", device), kernel("scale_unaligned", device), grid, arguments(x, y), ALIGNED
    )
    program.set_arena_bytes(4 * SIZE)
    program.set_outputs([])
    return program


def run(program: Program, x: Tensor) -> None:
    C.fake_cuda_mark(b"begin")
    program.run([x], [], True)
    C.fake_cuda_mark(b"end")


def aligned_and_unaligned() -> None:
    """Launches `scale`, then `scale_unaligned` three times."""
    program, block = launching_program(), torch.ones(2 * SIZE, device=DEVICE)
    for offset in (0, 1, 2, 3):
        run(program, block[offset : offset + SIZE])


def empty_grids() -> None:
    for grid in ((0, 1, 1), (2, 0, 1), (2, 1, 0)):
        run(launching_program(grid), torch.ones(SIZE, device=DEVICE))


def other_current_device() -> None:
    """The launch goes to the current stream of the kernel's device, which is not the current device."""
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream), torch.cuda.device(OTHER_DEVICE):
        run(launching_program(), torch.ones(SIZE, device=DEVICE))


def wrong_launches() -> None:
    """Each error says what was received."""

    def add(*arguments: object) -> Program:
        """Each argument is "x" or "y" for a tensor, or itself."""

        def convert(x: int, y: int) -> list[Any]:
            return [Value({"x": x, "y": y}[a]) if isinstance(a, str) else a for a in arguments]

        return launching_program(arguments=convert)

    def add_kernels_of_two_devices() -> None:
        kernels = kernel("scale"), kernel("scale", OTHER_DEVICE)
        Program(Arena(), DEVICE).add_launch(*kernels, GRID, [], ALIGNED)

    of_grid = "of the grid of kernel scale must be between 0 and"
    for pattern, call in (
        (f"dimension 1 {of_grid} 65535, got 65536", lambda: launching_program((1, 65536, 1))),
        (f"dimension 2 {of_grid} 65535, got -1", lambda: launching_program((1, 1, -1))),
        (f"dimension 0 {of_grid} {MAX}, got {MAX + 1}", lambda: launching_program((MAX + 1, 1, 1))),
        ("argument 2 of kernel scale has at most 8 bytes, got 9", lambda: add("x", "y", bytes(9))),
        ("argument 2 of kernel scale must be a Value or bytes, got 64", lambda: add("x", "y", 64)),
        ("must be on one device, got cuda:1 and cuda:2", add_kernels_of_two_devices),
    ):
        with pytest.raises(ValueError, match=pattern):
            call()
    program, x = launching_program(device=OTHER_DEVICE), torch.ones(SIZE, device=DEVICE)
    with pytest.raises(
        RuntimeError, match="argument 0 of kernel scale is on cuda:1, but the kernel on cuda:2"
    ):
        program.run([x], [], True)


def checks_wait_for_the_end_of_a_capture() -> None:
    """A check is not called while its step is captured, nor by a replay, but by the next execution."""
    found: list[float] = []
    program, x = launching_program(), torch.ones(SIZE, device=DEVICE)
    program.add_check(
        lambda inputs, outputs: found.append(inputs[0].sum().item()) is None, [Value(0)], [Value(1)]
    )
    program.set_outputs([])
    stream, graph, executable = torch.cuda.Stream(DEVICE), ctypes.c_void_p(), ctypes.c_void_p()
    handle, relaxed = ctypes.c_void_p(stream.cuda_stream), 2
    with torch.cuda.stream(stream):
        assert C.cudaStreamBeginCapture(handle, relaxed) == 0
        program.run([x], [], True)
        assert C.cudaStreamEndCapture(handle, ctypes.byref(graph)) == 0
        assert C.cudaGraphInstantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong()) == 0
        C.fake_cuda_mark(b"begin")
        assert C.cudaGraphLaunch(executable, handle) == 0
        C.fake_cuda_mark(b"end")
    assert found == []
    for _ in range(2):
        program.run([x], [], True)
    assert found == [SIZE]


class LaunchingProgram(Program):
    """A program whose last step launches a kernel that reads and writes its first output."""

    def __init__(self, arena: Arena, device: torch.device) -> None:
        super().__init__(arena, device)
        self._kernels = kernel("scale", device), kernel("scale_unaligned", device)

    def set_outputs(self, outputs: Sequence[int]) -> None:
        if outputs:
            self.add_launch(*self._kernels, GRID, launch_arguments(outputs[0], outputs[0]), ALIGNED)
        super().set_outputs(list(outputs))


def replays_launch_while_the_gil_is_held() -> None:
    """Marks when another thread holds the GIL, around forwards and backwards in turn."""
    program_module.NativeProgram = LaunchingProgram  # type: ignore[attr-defined]
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
    pipe = GPipe(
        model, [2, 2], devices=[DEVICE, OTHER_DEVICE], chunks=CHUNKS, checkpoint="never", capture=True
    )
    x = torch.randn(4 * CHUNKS, 8, device=DEVICE)
    forward, backward = native_calls(pipe, x)
    for _ in range(4):
        backward(forward())()
    for _ in range(ATTEMPTS):
        output = call_while_gil_is_held(forward)
        call_while_gil_is_held(backward(output))
    (report,) = pipeline_of(pipe).graph_reports()
    assert report.obstacle == ""
    assert report.replays >= ATTEMPTS


def call_while_gil_is_held(call: Callable[[], Any]) -> Any:
    """Marks in the log when another thread has acquired the GIL, and when it is about to release it."""
    go = threading.Lock()
    go.acquire()

    def hold() -> None:
        go.acquire()
        C.fake_cuda_mark(b"begin")
        C.usleep(200_000)
        C.fake_cuda_mark(b"end")

    holder = threading.Thread(target=hold)
    holder.start()
    with no_thread_switches():
        go.release()
        C.usleep(5000)  # until the holder waits only for the GIL, which only `call` releases
        result = call()
    holder.join()
    return result


def main() -> None:
    operators, _, *cases = sys.argv[1:]
    load(operators, deterministic=False)
    for case in cases:
        globals()[case]()
        print(case)


if __name__ == "__main__":
    main()

"""Device memory that graphs need, on a fake device; run by test_graphs.py.

`graph_memory.py OPERATORS NAME...`: runs functions of this file by name, and prints their results.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, doctor
from gpipe_fast._extension import GraphReport
from tests.fake_cuda.fake_devices import run_cases
from tests.internals import pipeline_of

WIDTH, CHUNKS, DEVICE = 64, 4, "cuda:0"
# Samples. Each activation of the longer mini-batch has 40 MiB, so 10 MiB per micro-batch; smaller tensors
# would share blocks of PyTorch's allocator, and the peak would depend on how they fit.
LONG, SHORT = 163840, 122880


def pipeline(checkpoint: str, *, capture: bool = True) -> GPipe:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    options = {"devices": [DEVICE] * 4, "checkpoint": checkpoint, "capture": capture}
    return GPipe(nn.Sequential(*blocks), [1] * 4, chunks=CHUNKS, **{"capture": True, **options})


def batch(samples: int, seed: int) -> Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def step(pipe: GPipe, samples: int, seed: int, loss: bool = False) -> list[Tensor]:
    """Returns the output and all gradients; without a loss, the output's gradient needs no memory."""
    y = pipe(batch(samples, seed))
    y.square().mean().backward() if loss else y.backward(y.detach())
    found = [y.detach().cpu(), *(p.grad.cpu() for p in pipe.parameters() if p.grad is not None)]
    pipe.zero_grad()
    return found


def inference(pipe: GPipe, samples: int, seed: int) -> list[Tensor]:
    with torch.no_grad():
        return [pipe(batch(samples, seed)).cpu()]


def reports(pipe: GPipe) -> list[GraphReport]:
    return pipeline_of(pipe).graph_reports()


def needed(checkpoint: str) -> int:
    """Returns the peak of reserved device memory in uncaptured training, in bytes."""
    pipe = pipeline(checkpoint, capture=False)
    for seed in range(5):
        step(pipe, LONG, seed, loss=True)
    return torch.cuda.max_memory_reserved(DEVICE)


def captured(checkpoint: str) -> str:
    pipe = pipeline(checkpoint)
    for seed in range(5):
        step(pipe, LONG, seed, loss=True)
    (report,) = reports(pipe)
    return f"{report.replays} replays {report.obstacle}{report.postponed}".strip()


def workspaces() -> str:
    """Returns the workspaces of the caller's own streams before and after a pipeline captures its steps.

    Also whether there was memory for the captures: the pipeline's own workspaces are freed before them.
    """
    num_workspaces = ctypes.CDLL(sys.argv[1]).fake_cuda_num_workspaces
    own = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(own):
        torch.mm(torch.ones(2, 2, device=DEVICE), torch.ones(2, 2, device=DEVICE))
    before = num_workspaces(ctypes.c_void_p(own.cuda_stream))
    return f"{before}, {captured('always')}, {num_workspaces(ctypes.c_void_p(own.cuda_stream))}"


def graphs(checkpoint: str, *lengths: int) -> int:
    """Returns the bytes of all graphs after plans of these lengths were captured in this order."""
    pipe = pipeline(checkpoint)
    for samples in lengths:
        for seed in range(4):
            step(pipe, samples, seed)
    assert all(r.forward and r.backward for r in reports(pipe)), doctor(pipe)
    return sum(r.bytes for r in reports(pipe))


def several_lengths() -> None:
    """Graphs of four lengths need little more memory than the longest one's, in either order of capture."""
    for checkpoint in ("never", "always"):
        longest, lengths = graphs(checkpoint, LONG), (LONG, SHORT, 102400, 81920)
        for each in (lengths, lengths[::-1]):
            found = graphs(checkpoint, *each)
            assert found < 1.2 * longest, (checkpoint, each, found, longest)


def short_of_memory(run: Callable[[GPipe, int, int], list[Tensor]], samples: int) -> None:
    """Runs a mini-batch too large for the memory beside graphs, which are freed, and captured again."""
    pipe, other = pipeline("always"), pipeline("always", capture=False)
    for seed in range(4):
        step(pipe, SHORT, seed)
    assert [r.replays for r in reports(pipe)] == [2], reports(pipe)
    found, report = run(pipe, samples, 5), doctor(pipe)
    assert "memory ran out in a mini-batch that was not replayed, and capture is tried again later" in report
    for seed in range(6):
        step(pipe, SHORT, seed)
    assert max(r.replays for r in reports(pipe)) == 4
    del pipe
    torch.cuda.empty_cache()
    assert all(map(torch.equal, found, run(other, samples, 5)))


if __name__ == "__main__":
    run_cases(
        {
            "needed_never": partial(needed, "never"),
            "needed_always": partial(needed, "always"),
            "captured_never": partial(captured, "never"),
            "workspaces": workspaces,
            "several_lengths": several_lengths,
            "short_of_memory_in_a_forward": partial(short_of_memory, inference, 2 * LONG),
            "short_of_memory_in_a_backward": partial(short_of_memory, step, LONG),
        }
    )

"""Device memory that graphs need, on a fake device; run by test_graphs.py.

`graph_memory.py OPERATORS NAME...`: runs functions of this file by name, and prints their results.
"""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, doctor
from gpipe_fast._extension import GraphReport
from tests.internals import pipeline_of

MIB = 1 << 20
WIDTH, CHUNKS, DEVICE = 64, 4, "cuda:0"
OPERATORS = sys.argv[1]
# Samples. Each activation of the longer mini-batch has 40 MiB, so 10 MiB per micro-batch; smaller tensors
# would share blocks of PyTorch's allocator, and the peak would depend on how they fit.
LONG, SHORT = 163840, 122880


def model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks)


def pipeline(checkpoint: str, *, capture: bool = True) -> GPipe:
    return GPipe(
        model(), [1] * 4, devices=[DEVICE] * 4, chunks=CHUNKS, checkpoint=checkpoint, capture=capture
    )


def from_loss(y: Tensor) -> None:
    y.square().mean().backward()


def from_output(y: Tensor) -> None:
    """Runs the backward with a gradient that allocates no memory."""
    y.backward(y.detach())


def batch(samples: int, seed: int) -> Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed))


def step(
    pipe: GPipe, samples: int, seed: int, backward: Callable[[Tensor], None] = from_output
) -> list[Tensor]:
    """Returns the output and all gradients, on the CPU."""
    pipe.zero_grad()
    y = pipe(batch(samples, seed).to(DEVICE))
    backward(y)
    found = [y.detach().cpu(), *(p.grad.cpu() for p in pipe.parameters() if p.grad is not None)]
    pipe.zero_grad()
    return found


def inference(pipe: GPipe, samples: int, seed: int) -> list[Tensor]:
    with torch.no_grad():
        return [pipe(batch(samples, seed).to(DEVICE)).cpu()]


def reports(pipe: GPipe) -> list[GraphReport]:
    return pipeline_of(pipe).graph_reports()


def needed(checkpoint: str) -> int:
    """Returns the peak of reserved device memory in uncaptured training, in bytes."""
    pipe = pipeline(checkpoint, capture=False)
    for seed in range(5):
        step(pipe, LONG, seed, from_loss)
    return torch.cuda.max_memory_reserved(DEVICE)


def needed_never() -> int:
    return needed("never")


def needed_always() -> int:
    return needed("always")


def captured(checkpoint: str) -> str:
    pipe = pipeline(checkpoint)
    for seed in range(5):
        step(pipe, LONG, seed, from_loss)
    (report,) = reports(pipe)
    return f"{report.replays} replays {report.obstacle}{report.postponed}".strip()


def captured_never() -> str:
    return captured("never")


def captured_always() -> str:
    return captured("always")


def workspaces() -> str:
    """Returns the workspaces of the caller's own streams before and after a pipeline captures its steps.

    Also whether there was memory for the captures: the pipeline's own workspaces are freed before them.
    """
    num_workspaces = ctypes.CDLL(OPERATORS).fake_cuda_num_workspaces
    own = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(own):
        torch.mm(torch.ones(2, 2, device=DEVICE), torch.ones(2, 2, device=DEVICE))
    before = num_workspaces(ctypes.c_void_p(own.cuda_stream))
    return f"{before}, {captured('always')}, {num_workspaces(ctypes.c_void_p(own.cuda_stream))}"


def _graphs(checkpoint: str, lengths: Sequence[int]) -> int:
    """Returns the bytes of all graphs after plans of these lengths were captured in this order."""
    pipe = pipeline(checkpoint)
    for samples in lengths:
        for seed in range(4):
            step(pipe, samples, seed)
    assert all(r.forward and r.backward for r in reports(pipe)), doctor(pipe)
    return sum(r.bytes for r in reports(pipe))


def several_lengths() -> str:
    """Returns the MiB of the graphs of one length, and of five lengths in two orders, by checkpoint mode."""
    words = []
    for checkpoint in ("never", "always"):
        for lengths in ([LONG], [LONG, 143360, SHORT, 102400, 81920], [81920, 102400, SHORT, 143360, LONG]):
            words.append(f"{_graphs(checkpoint, lengths) / MIB:.0f}")
    return " ".join(words)


def _short_of_memory(run: Callable[[GPipe, int, int], list[Tensor]], samples: int) -> str:
    """Runs a mini-batch too large for the memory beside the graphs; returns whether its bits are right.

    The graphs are freed, and captured again later: also returns the number of replays after that.
    """
    pipe, other = pipeline("always"), copy.deepcopy(pipeline("always", capture=False))
    for seed in range(4):
        step(pipe, SHORT, seed)
    assert [r.replays for r in reports(pipe)] == [2], reports(pipe)
    found = run(pipe, samples, 5)
    report = doctor(pipe)
    assert (
        "memory ran out in a mini-batch that was not replayed, and capture is tried again later" in report
    ), report
    for seed in range(6):
        step(pipe, SHORT, seed)
    again = max(r.replays for r in reports(pipe))
    del pipe
    torch.cuda.empty_cache()
    expected = run(other, samples, 5)
    same = all(map(torch.equal, found, expected))
    return f"{'equal' if same else 'not equal'}, {again} replays"


def short_of_memory_in_a_forward() -> str:
    return _short_of_memory(inference, 2 * LONG)


def short_of_memory_in_a_backward() -> str:
    return _short_of_memory(step, LONG)


def main() -> None:
    names = sys.argv[2:]
    torch.ops.load_library(OPERATORS)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name in names:
        print(globals()[name]())


if __name__ == "__main__":
    main()

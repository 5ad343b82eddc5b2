"""What graphs need of a GPU's memory, on one that is not there; run by test_graphs.py.

`graph_memory.py OPERATORS NAME...`: runs some of the functions below, and prints what each returns.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, doctor
from gpipe_fast._extension import ReplayReport
from tests.inside import pipeline_of

MIB = 1 << 20
WIDTH, CHUNKS, DEVICE = 64, 4, "cuda:0"
# A mini-batch of the longer shape has 40 MiB in each activation. Below 10 MiB a part would share a block of
# PyTorch's allocator with others, and how many fit would count.
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
    """By a gradient that takes no memory of its own."""
    y.backward(y.detach())


def batch(samples: int, seed: int) -> Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed))


def step(
    pipe: GPipe, samples: int, seed: int, backward: Callable[[Tensor], None] = from_output
) -> list[Tensor]:
    """The output and all gradients, on the CPU."""
    pipe.zero_grad()
    y = pipe(batch(samples, seed).to(DEVICE))
    backward(y)
    found = [y.detach().cpu(), *(p.grad.cpu() for p in pipe.parameters() if p.grad is not None)]
    pipe.zero_grad()
    return found


def inference(pipe: GPipe, samples: int, seed: int) -> list[Tensor]:
    with torch.no_grad():
        return [pipe(batch(samples, seed).to(DEVICE)).cpu()]


def reports(pipe: GPipe) -> list[ReplayReport]:
    return pipeline_of(pipe).replays()


def needed(checkpoint: str) -> int:
    """Bytes that training takes from the device at most."""
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
    return f"{report.replays} replays {report.obstacle}{report.setback}".strip()


def captured_never() -> str:
    return captured("never")


def captured_always() -> str:
    return captured("always")


def _graphs(checkpoint: str, lengths: Sequence[int]) -> int:
    """Bytes of all graphs, when plans of these lengths are captured in turn."""
    pipe = pipeline(checkpoint)
    for samples in lengths:
        for seed in range(4):
            step(pipe, samples, seed)
    assert all(r.forward and r.backward for r in reports(pipe)), doctor(pipe)
    return sum(r.bytes for r in reports(pipe))


def several_lengths() -> str:
    """What graphs of one, and of five lengths take, in MiB."""
    words = []
    for checkpoint in ("never", "always"):
        for lengths in ([LONG], [LONG, 143360, SHORT, 102400, 81920], [81920, 102400, SHORT, 143360, LONG]):
            words.append(f"{_graphs(checkpoint, lengths) / MIB:.0f}")
    return " ".join(words)


def _short_of_memory(run: Callable[[GPipe, int, int], list[Tensor]], samples: int) -> str:
    """A larger mini-batch that has no room beside the graphs; its bits, and what happens to the graphs."""
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
    operators, *names = sys.argv[1:]
    torch.ops.load_library(operators)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name in names:
        print(globals()[name]())


if __name__ == "__main__":
    main()

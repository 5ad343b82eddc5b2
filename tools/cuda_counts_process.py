"""The process in which `cuda_counts` counts a step, on the fake CUDA runtime of tests/fake_cuda.

`python -m tools.cuda_counts_process OPERATORS PACKAGE SETUP` loads the operators, imports gpipe_fast from the
folder PACKAGE and trains as the JSON SETUP describes. Marks in the log enclose the last step.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from bench.models.gpt import gpt
from bench.peers import checkpointed, looped

STAGES, CHUNKS = 4, 8
WIDTH, HEADS, VOCAB, LENGTH, BATCH = 32, 4, 64, 8, 16
# The first two steps make plans; the third captures graphs.
WARM_UP = 4
BEGIN, END = "counted", "counted to here"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.float32}


@dataclass(frozen=True)
class Setup:
    """The model and the way it is trained.

    Attributes:
        mode: 'captured', 'uncaptured', or 'plain loop', which recomputes each stage as a whole.
        precision: 'fp32', 'bf16', or 'autocast' of fp32 parameters to bf16.
        devices: number of devices that the four stages share.
        blocks: number of blocks of the GPT.
        dropout: the probability of a dropout layer after each block; no such layer if 0.
    """

    mode: str
    precision: str
    devices: int = 1
    blocks: int = 24
    dropout: float = 0.0

    def text(self) -> str:
        return json.dumps(asdict(self))


def layers(setup: Setup) -> list[nn.Module]:
    """Returns embedding, blocks, norm and head; a dropout forms one layer with its block."""
    found: list[nn.Module] = []
    for name, layer in gpt(setup.blocks, WIDTH, HEADS, VOCAB, LENGTH).named_children():
        has_dropout = name.startswith("block") and setup.dropout > 0
        found.append(nn.Sequential(layer, nn.Dropout(setup.dropout)) if has_dropout else layer)
    return found


def balance(count: int) -> list[int]:
    """Returns the most even balance."""
    cuts = [count * stage // STAGES for stage in range(STAGES + 1)]
    return [end - begin for begin, end in itertools.pairwise(cuts)]


def build_forward(setup: Setup) -> tuple[Callable[[Tensor], Tensor], list[nn.Parameter]]:
    """Returns the pipeline or the plain loop, and its parameters on their devices."""
    from gpipe_fast import GPipe

    torch.manual_seed(0)
    model = nn.Sequential(*layers(setup)).to(DTYPES[setup.precision])
    if setup.mode == "plain loop":
        model.to("cuda:0")
        ends = list(itertools.accumulate(balance(len(model))))
        stages = [model[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        return looped(checkpointed(stages), CHUNKS), list(model.parameters())
    devices = [f"cuda:{stage * setup.devices // STAGES}" for stage in range(STAGES)]
    capture = setup.mode == "captured"
    pipe = GPipe(model, balance(len(model)), devices=devices, chunks=CHUNKS, capture=capture)
    return pipe, list(pipe.parameters())


def train(setup: Setup, mark: Callable[[bytes], object]) -> Callable[[Tensor], Tensor]:
    """Prints the parameters' addresses and trains; marks the last step and returns the forward function.

    Gradients are reset before each step and no optimizer runs: only forward and backward are counted.
    """
    forward, parameters = build_forward(setup)
    print(*(hex(parameter.data_ptr()) for parameter in parameters))
    x = torch.randint(VOCAB, (BATCH, LENGTH)).to("cuda:0")
    gradient = torch.randn(BATCH, LENGTH, VOCAB).to(f"cuda:{setup.devices - 1}")
    gradient = gradient.to(torch.float32 if setup.precision == "fp32" else torch.bfloat16)
    use_autocast = setup.precision == "autocast"
    for step in range(WARM_UP + 1):
        for parameter in parameters:
            parameter.grad = None
        if step == WARM_UP:
            mark(BEGIN.encode())
        with torch.autocast("cuda", torch.bfloat16, enabled=use_autocast):
            y = forward(x)
        y.backward(gradient)
        mark(END.encode())
    return forward


def main() -> None:
    operators, package, text = sys.argv[1:]
    sys.path.insert(0, package)
    import gpipe_fast

    torch.ops.load_library(operators)
    torch.backends.cudnn.enabled = False
    for enable in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"):
        getattr(torch.backends.cuda, enable)(False)
    torch.set_num_threads(1)
    forward = train(Setup(**json.loads(text)), ctypes.CDLL(None).fake_cuda_mark)
    if isinstance(forward, gpipe_fast.GPipe):
        print(gpipe_fast.doctor(forward))
    # Skips destructors of static objects, which may run while autograd's threads are still alive.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

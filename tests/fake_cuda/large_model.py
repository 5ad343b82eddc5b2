"""Trains a model that is larger than the host's memory; run by test_large_model.py on the fake CUDA runtime.

`large_model.py OPERATORS FILE`: after the imports, the process may allocate LIMIT MiB more of private memory
(RLIMIT_DATA). Memory of the fake GPUs must be shared memory (FAKE_CUDA_SHARED), which does not count. Builds
layers on the meta device, loads FILE, and trains four stages on four fake GPUs. Prints the losses and a
checksum of each parameter and gradient.
"""

from __future__ import annotations

import hashlib
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.fake_cuda.fake_devices import load

NUM_LINEAR, WIDTH, BATCH, CHUNKS, STEPS, STAGES = 16, 2048, 8, 4, 2, 4
LIMIT = 160  # MiB; the parameters take 256 MiB
MIB = 1 << 20


def layers() -> nn.Sequential:
    pairs = [(nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH)) for _ in range(NUM_LINEAR)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def limit_memory() -> None:
    """Limits the private memory to what the process has and LIMIT MiB."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    limit = int(found[1]) * 1024 + LIMIT * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def checksum(tensor: Tensor | None) -> str:
    assert tensor is not None
    return hashlib.sha256(memoryview(tensor.detach().cpu().view(-1).numpy())).hexdigest()[:16]


def train(model: nn.Module, run: Callable[[Tensor], Tensor], device: str) -> list[str]:
    """Returns the losses of the steps, and a checksum of each parameter and gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        x = torch.linspace(-1 - step, 1, BATCH * WIDTH).view(BATCH, WIDTH).to(device)
        loss = run(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses + [f"{name} {checksum(p)} {checksum(p.grad)}" for name, p in model.named_parameters()]


if __name__ == "__main__":
    load(sys.argv[1])
    torch.zeros(1, device="cuda")
    limit_memory()
    with torch.device("meta"):
        module = layers()
    pipe = GPipe(module, [len(module) // STAGES] * STAGES, chunks=CHUNKS)
    pipe.load_weights(Path(sys.argv[2]))
    print(*train(pipe, pipe, "cuda:0"), sep="\n")

"""Trains a model that is larger than the host's memory; run by test_large_model.py on the fake CUDA runtime.

`large_model.py OPERATORS WAY FILE WIDTH LIMIT`: after the imports, the process may allocate LIMIT MiB more of
private memory (RLIMIT_DATA). Memory of the fake GPUs must be shared memory (FAKE_CUDA_SHARED), which does not
count. `pipeline` builds layers of this width on the meta device, loads FILE, and trains four stages on four
fake GPUs; `plain` builds the layers on the CPU, loads FILE, and trains the plain loop there. Prints the limit
in bytes; then the losses of the steps and a checksum of each parameter and gradient, or the error if memory
runs out.
"""

from __future__ import annotations

import hashlib
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gpipe_fast import GPipe

NUM_LINEAR, BATCH, CHUNKS, STEPS, STAGES = 16, 8, 4, 2, 4
MIB = 1 << 20


def layers(width: int) -> nn.Sequential:
    """Returns layers with 64 * width ** 2 bytes of parameters, and a few more in the norms."""
    pairs = [(nn.Linear(width, width, bias=False), nn.LayerNorm(width)) for _ in range(NUM_LINEAR)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def limit_memory(mib: int) -> int:
    """Limits the private memory to what the process has and so many MiB, and returns the limit in bytes."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    limit = int(found[1]) * 1024 + mib * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return limit


def checksum(tensor: Tensor | None) -> str:
    assert tensor is not None
    return hashlib.sha256(memoryview(tensor.detach().cpu().view(-1).numpy())).hexdigest()[:16]


def train(model: nn.Module, run: Callable[[Tensor], Tensor], width: int, device: str) -> list[str]:
    """Returns the losses of the steps, and a checksum of each parameter and gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        x = torch.linspace(-1 - step, 1, BATCH * width).view(BATCH, width).to(device)
        loss = run(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses + [f"{name} {checksum(p)} {checksum(p.grad)}" for name, p in model.named_parameters()]


def train_pipeline(path: Path, width: int) -> list[str]:
    with torch.device("meta"):
        module = layers(width)
    model = GPipe(module, [len(module) // STAGES] * STAGES, chunks=CHUNKS)
    model.load_weights(path)
    return train(model, model, width, "cuda:0")


def train_plain(path: Path, width: int) -> list[str]:
    model = layers(width)
    model.load_state_dict(load_file(path))
    return train(model, lambda x: torch.cat([model(part) for part in x.chunk(CHUNKS)]), width, "cpu")


def main() -> None:
    operators, way, path, width, limit = sys.argv[1:]
    torch.ops.load_library(operators)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # otherwise addmm may add unrounded products to gradients
    torch.zeros(1, device="cuda")
    print(limit_memory(int(limit)))
    try:
        lines = {"pipeline": train_pipeline, "plain": train_plain}[way](Path(path), int(width))
    except (MemoryError, RuntimeError) as error:
        lines = [f"{type(error).__name__}: {error}"]
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()

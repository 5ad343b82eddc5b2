"""Trains layers with the user's own Triton kernels; test_user_kernels.py preloads the fake runtime.

`user_kernel_cases.py OPERATORS CASE`: loads the operators and runs a case. Kernels are traced and compiled as
on a GPU, and Triton's interpreter runs what the pipeline launches. Prints a JSON object: the largest relative
error of the outputs and the gradients, the kernels that programs launch, and the warnings.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.runtime.interpreter import InterpretedFunction

from gpipe_fast import GPipe
from gpipe_fast.trace.triton_calls import TritonCall
from tests.fake_cuda import interpreter, user_kernels
from tests.fake_cuda.fake_devices import load
from tests.internals import programs_of

DEVICE = torch.device("cuda:0")
WIDTH, BATCH = 8, 6


class Driver:
    """What PyTorch asks Triton's driver when it looks which tensors a kernel writes."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns the output and all gradients of one step."""
    x = x.clone().requires_grad_()
    for parameter in model.parameters():
        parameter.grad = None
    output = model(x)
    output.backward(torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(output.device, x.dtype))
    found = [output, x.grad, *(p.grad for p in model.parameters())]
    return [t.detach().cpu().double() for t in found if t is not None]


def train(layers: list[nn.Module], plain: list[nn.Module], steps: int = 1, **options: Any) -> dict[str, Any]:
    """Compares steps of a pipeline with the same layers on the CPU, whose kernels are PyTorch's operators."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = {"chunks": 2, "fuse": False, "checkpoint": "never", **options}
        model = GPipe(nn.Sequential(*copy.deepcopy(layers)), [len(layers)], devices=[DEVICE], **given)
        errors = []
        for step in range(steps):
            x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
            expected = results(nn.Sequential(*plain).double(), x.double())
            pairs = zip(results(model, x.to(DEVICE)), expected, strict=True)
            errors += [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
    return {
        "error": max(errors),
        "launches": [s.launch.name for p in programs_of(model) for s in p.steps if hasattr(s, "launch")],
        "failures": interpreter.failures(),
        "warnings": [str(w.message) for w in caught],
    }


def run(**options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    ours = [user_kernels.ScaledSiLU(WIDTH), user_kernels.Shifted(), user_kernels.Shifted(is_tuned=True)]
    plain = [
        user_kernels.PlainScaledSiLU(WIDTH),
        user_kernels.PlainShifted(16),
        user_kernels.PlainShifted(0.25),
    ]
    return train([first, *ours, last], copy.deepcopy([first, *plain, last]), **options)


def choose(call: TritonCall, grids: Sequence[Any], arguments: dict[str, Any]) -> None:
    """Chooses an autotuner's last configuration: the fake device times no kernel."""
    call.kernel.best_config = call.kernel.configs[-1]


# One case a process: once the interpreter has run, PyTorch cannot analyze kernels any more.
CASES: dict[str, dict[str, Any]] = {
    "recomputing": {"checkpoint": "always", "fuse": True},
    "captured": {"steps": 4, "capture": True},
}


if __name__ == "__main__":
    load(sys.argv[1], deterministic=False)
    triton.runtime.driver.set_active(Driver())
    interpreter.register_loaded(lambda launch: InterpretedFunction(launch.kernel.fn))
    mock.patch.object(TritonCall, "launch", choose).start()
    print(json.dumps(run(**CASES[sys.argv[2]])))

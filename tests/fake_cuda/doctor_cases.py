"""Prints doctor()'s reports on a pipeline on fake devices; run by test_pipelines.py on the fake runtime.

`doctor_cases.py OPERATORS DEVICES TRANSPORT`: prints doctor()'s report before and after a step, and "equal"
if the step's gradients equal the CPU's; or the error if the pipeline cannot be constructed. Only the pipeline
copies between devices.
"""

from __future__ import annotations

import copy
import sys

import torch
from torch import nn

from gpipe_fast import GPipe, doctor
from tests.fake_cuda.fake_devices import load
from tests.fake_cuda.train_models import PopSkip, StashSkip

BATCH, CHUNKS, WIDTH = 8, 4, 6


def main() -> None:
    operators, devices, transport = sys.argv[1:]
    load(operators)
    torch.manual_seed(0)
    plain = nn.Sequential(StashSkip(), nn.Linear(WIDTH, WIDTH), nn.GELU(), PopSkip())
    where = devices.split(",")
    try:
        pipeline = GPipe(
            copy.deepcopy(plain), [1] * len(where), devices=where, chunks=CHUNKS, transport=transport
        )
    except ValueError as error:
        print(error)
        return
    x = torch.randn(BATCH, WIDTH)
    print(doctor(pipeline))
    pipeline(x.to(where[0]).requires_grad_()).square().mean().backward()
    torch.cat([plain(part) for part in x.chunk(CHUNKS)]).square().mean().backward()
    same = [
        torch.equal(own.grad.cpu(), other.grad)
        for own, other in zip(pipeline.parameters(), plain.parameters(), strict=True)
    ]
    print("equal" if all(same) else "not equal")
    print(doctor(pipeline))
    print(pipeline)


if __name__ == "__main__":
    main()

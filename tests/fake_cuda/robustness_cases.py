"""Shared streams, other threads and warnings on fake devices; run by test_robustness.py.

`robustness_cases.py OPERATORS NAME...`: runs functions of this file by name, and prints the name of each.
"""

from __future__ import annotations

import copy
import hashlib
import sys
import threading
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.fake_cuda.train_models import BATCH, WIDTH, layers_of
from tests.internals import pipeline_of

CHUNKS, STEPS = 4, 5
POOL_SIZE = 32  # streams per device that torch hands out round-robin


class PipelineAndLoop:
    """A pipeline, and the plain loop on the CPU."""

    def __init__(self, devices: list[str], balance: list[int], **keywords: object) -> None:
        torch.manual_seed(0)
        self.plain = nn.Sequential(*layers_of("mlp"))
        self.pipeline = GPipe(
            copy.deepcopy(self.plain), balance, devices=devices, chunks=CHUNKS, checkpoint="never", **keywords
        )
        self.device = devices[0]

    def step(self, seed: int) -> None:
        torch.manual_seed(seed)
        x = torch.randn(BATCH, WIDTH)
        ours = self._gradients(self.pipeline, x.to(self.device), self.pipeline)
        expected = self._gradients(
            self.plain, x, lambda x: torch.cat([self.plain(part) for part in x.chunk(CHUNKS)])
        )
        assert all(map(torch.equal, ours, expected)), f"step {seed}"

    @staticmethod
    def _gradients(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x.requires_grad_()
        y = run(x)
        for parameter in model.parameters():
            parameter.grad = None
        y.square().sum().backward()
        found = [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]
        return [tensor.cpu() for tensor in found if tensor is not None]

    def check_replayed(self) -> None:
        (report,) = (report for report in pipeline_of(self.pipeline).graph_reports() if report.uncaptured > 1)
        assert report.forward, report.obstacle
        assert report.backward, report.obstacle


def eight_stages_on_one_device() -> None:
    """Five streams per stage make 40, more than a pool has."""
    for transport in ("auto", "peer", "pinned"):
        twins = PipelineAndLoop(["cuda:0"] * 8, [1] * 8, transport=transport)
        for seed in range(STEPS):
            twins.step(seed)
        twins.check_replayed()


def a_second_thread_on_pool_streams() -> None:
    """Another thread adds numbers on every stream of a device's pool during captures on that device."""
    twins = PipelineAndLoop(["cuda:0", "cuda:0", "cuda:1", "cuda:1"], [2] * 4)
    done = threading.Event()
    wrong: list[str] = []
    thread = threading.Thread(target=_add_on_pool_streams, args=(done, wrong))
    thread.start()
    try:
        for seed in range(STEPS):
            twins.step(seed)
    finally:
        done.set()
        thread.join()
    assert not wrong, wrong[:3]
    twins.check_replayed()


def _add_on_pool_streams(done: threading.Event, wrong: list[str]) -> None:
    try:
        streams = [torch.cuda.Stream("cuda:0") for _ in range(POOL_SIZE)]
        sums = torch.zeros(POOL_SIZE, device="cuda:0")
        torch.cuda.synchronize("cuda:0")
        count = 0
        while not done.is_set():
            for place, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    sums[place].add_(1)
            count += 1
        torch.cuda.synchronize("cuda:0")
        if not sums.eq(count).all():
            wrong.append(f"{sums} is not {count}")
    except RuntimeError as error:
        wrong.append(str(error))


def fused_addmm_digests() -> None:
    """Prints digests of gradients, uncaptured and captured, without and then with deterministic algorithms.

    By default, addmm adds a product to the gradient without rounding it first, which no plain loop does.
    """
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 8)]
        devices = ["cuda:0", "cuda:1"]
        pipeline = GPipe(nn.Sequential(*layers), [2, 2], devices=devices, chunks=CHUNKS, checkpoint="always")
        digest = hashlib.sha256()
        for _ in range(STEPS):
            pipeline(torch.randn(CHUNKS * 700, WIDTH).cuda()).square().sum().backward()
            for parameter in pipeline.parameters():
                digest.update(parameter.grad.cpu().numpy().tobytes())
                parameter.data.add_(parameter.grad, alpha=-1e-4)
                parameter.grad = None
        print(digest.hexdigest())


def streams_of_one_device_warn_of_nothing() -> None:
    """The caller has an own stream on the last stage's device only."""
    twins = PipelineAndLoop(["cuda:0", "cuda:1"], [4, 4])
    with warnings.catch_warnings(record=True) as found, torch.cuda.stream(torch.cuda.Stream("cuda:1")):
        warnings.simplefilter("always")
        twins.step(0)
    assert not [each for each in found if "AccumulateGrad" in str(each.message)]


CASES = (
    eight_stages_on_one_device,
    a_second_thread_on_pool_streams,
    streams_of_one_device_warn_of_nothing,
    fused_addmm_digests,
)


def main() -> None:
    operators, *names = sys.argv[1:]
    torch.ops.load_library(operators)
    torch.backends.cudnn.enabled = False
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # otherwise addmm may add unrounded products to gradients
    functions = {function.__name__: function for function in CASES}
    for name in names:
        functions[name]()
        print(name)


if __name__ == "__main__":
    main()

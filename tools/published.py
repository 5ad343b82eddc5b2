"""The published tables of GPipe and torchgpipe, computed by `simulate` from counted costs of their layers.

`simulate` with counted costs: nothing runs, and nothing is fitted to the published figures. An
operator of a layer's forward takes as long as its operations or its bytes at the speeds of the device's
data sheet, whichever is longer, counted on meta tensors of the micro-batch's size; a layer takes the sum. A
backward takes twice as long as a forward, a recompute as long as a forward. A boundary tensor takes its
bytes divided by the speed of the link. Backwards are not split, as in both libraries: a boundary gradient
is sent after the whole backward. Not modelled: kernel launches, Python, the loss, the optimizer, shared
links, and the lower efficiency of small kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from bench.measure import Table, report
from bench.models.amoebanet import amoebanet_d
from bench.models.gpt import gpt
from bench.models.resnet import resnet101
from bench.models.unet import unet
from gpipe_fast import simulate
from gpipe_fast.balance import balance_by_cost
from gpipe_fast.skip import Key, declared, skip_scope


@dataclass(frozen=True)
class Device:
    """A device at the speeds of its data sheet, and the connection to the next one.

    Attributes:
        name: the name of the device.
        flops: floating-point operations per second.
        memory: bytes per second from and to its memory.
        link: bytes per second to another device.
        dtype: the type of parameters and activations.
    """

    name: str
    flops: float
    memory: float
    link: float
    dtype: torch.dtype = torch.float32


NVLINK, PCIE = 150e9, 12e9
P40 = Device("Tesla P40", 11.8e12, 346e9, PCIE)
TPU = Device("core of a TPUv3", 61e12, 450e9, NVLINK, torch.bfloat16)


@dataclass(frozen=True)
class Cost:
    """The costs of a layer's forward of one micro-batch.

    Attributes:
        seconds: the time of its operators, each as long as its operations or its bytes take.
        flops: the floating-point operations of its products and convolutions.
        output_bytes: the bytes of its output.
        stashed: the bytes of each skip tensor that it stashes.
        popped: the skip tensors that it pops.
    """

    seconds: float
    flops: int
    output_bytes: int
    stashed: dict[Key, int] = field(default_factory=dict)
    popped: tuple[Key, ...] = ()


class _Counter(TorchDispatchMode):
    """Adds up the time of operators: each takes as long as its operations or its bytes, the longer."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.seconds, self.flops = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            count = flop_registry.get(func.overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=found) if count else 0
            self.flops += flops
            moved = num_bytes((args, kwargs, found))
            self.seconds += max(flops / self.device.flops, moved / self.device.memory)
        return found


def num_bytes(value: Any) -> int:
    """Returns the bytes of all tensors in a value."""
    return sum(x.numel() * x.element_size() for x in tree_leaves(value) if isinstance(x, Tensor))


def costs(layers: nn.Sequential, sample: Tensor, device: Device) -> list[Cost]:
    """Counts the costs of layers on meta tensors."""
    found = []
    value: Any = sample
    with torch.no_grad(), skip_scope({}) as skips:
        for layer in layers:
            with _Counter(device) as counter:
                value = layer(value)
            stashed, popped = declared(layer)
            sizes = {key: num_bytes(skips[key]) for key in stashed}
            found.append(Cost(counter.seconds, counter.flops, num_bytes(value), sizes, tuple(popped)))
    return found


def entering(layers: Sequence[Cost], balance: Sequence[int]) -> list[int]:
    """Returns the bytes that enter each stage: the output of the layer before it, and skip tensors.

    A skip tensor goes directly to the stage that pops it.

    Args:
        layers: the costs of the layers.
        balance: the number of layers of each stage.
    """
    found, begin = [0], 0
    for size, next_size in pairwise(balance):
        begin += size
        stashed = {key: num for layer in layers[:begin] for key, num in layer.stashed.items()}
        popped = {key for layer in layers[begin : begin + next_size] for key in layer.popped}
        crossing = sum(num for key, num in stashed.items() if key in popped)
        found.append(layers[begin - 1].output_bytes + crossing)
    return found


@dataclass(frozen=True)
class Setting:
    """A row of a published table.

    Attributes:
        name: its name.
        num_stages: K; 0 for the model without a pipeline.
        batch: the number of samples.
        chunks: M.
        published: the published throughput, in any unit.
        balance: the number of layers of each stage; by default, the variance of their operations is least.
        checkpoint: the checkpoint mode.
    """

    name: str
    num_stages: int
    batch: int
    chunks: int
    published: float
    balance: tuple[int, ...] = ()
    checkpoint: str = "except_last"


@dataclass(frozen=True)
class Published:
    """A published table.

    Attributes:
        model: the name of the model.
        make: makes its layers.
        sample: makes an input from the number of samples.
        device: the devices.
        settings: the rows, of which the first is the baseline.
    """

    model: str
    make: Callable[[], nn.Sequential]
    sample: Callable[[int], Tensor]
    device: Device
    settings: Sequence[Setting]

    def seconds(self, setting: Setting, by_time: bool = False) -> float:
        """Returns the simulated seconds of a step.

        Args:
            setting: the row.
            by_time: whether layers without a published balance are cut by their time, and not by operations.
        """
        size = -(-setting.batch // setting.chunks)
        layers = _costs(self.make, self.sample, size, self.device)
        if not setting.num_stages:
            return sum(3 * layer.seconds for layer in layers)
        cut = [layer.seconds if by_time else layer.flops for layer in layers]
        balance = list(setting.balance) or balance_by_cost(setting.num_stages, cut, "variance")
        assert sum(balance) == len(layers), (self.model, len(layers), balance)
        ends = [sum(balance[: i + 1]) for i in range(len(balance))]
        forward = [
            sum(layer.seconds for layer in layers[end - size : end])
            for end, size in zip(ends, balance, strict=True)
        ]
        crossing = [num / self.device.link for num in entering(layers, balance)]
        return simulate(
            "gpipe",
            setting.num_stages,
            setting.chunks,
            forward=forward,
            backward=[2 * x for x in forward],
            weights=0.0,  # a boundary gradient is sent after the whole backward
            checkpoint=setting.checkpoint,
            bandwidth=1.0,
            boundary_bytes=crossing,
        ).time

    def speeds(self, by_time: bool = False) -> list[float]:
        """Returns the simulated samples per second of each row; ``by_time`` as for `seconds`."""
        return [setting.batch / self.seconds(setting, by_time) for setting in self.settings]

    def rows(self, by_time: bool = False) -> list[list[object]]:
        """Returns a row for each setting: speeds, and speed-ups over the first row; ``by_time`` as above."""
        found: list[list[object]] = []
        speeds = self.speeds(by_time)
        for setting, speed in zip(self.settings, speeds, strict=True):
            simulated, published = speed / speeds[0], setting.published / self.settings[0].published
            ratios = simulated, published, simulated / published
            found.append([self.model, setting.name, speed, setting.published, *ratios])
        return found


@cache
def _costs(make: Any, sample: Any, size: int, device: Device) -> list[Cost]:
    with torch.device("meta"):
        x = sample(size)
        return costs(make().to(device.dtype), x.to(device.dtype) if x.is_floating_point() else x, device)


def images(side: int) -> Callable[[int], Tensor]:
    return partial(_images, side)


def _images(side: int, size: int) -> Tensor:
    return torch.empty(size, 3, side, side)


def tokens(size: int) -> Tensor:
    return torch.zeros(size, 1024, dtype=torch.long)


AMOEBANET, UNET = partial(amoebanet_d, 18, 256), partial(unet, 5, 64)
IMAGES_224, IMAGES_192 = images(224), images(192)


def _paper(batch: int, published: Sequence[float]) -> list[Setting]:
    """Returns rows for each M and K; everything is recomputed."""
    keys = [(k, m) for m in (1, 4, 32) for k in (2, 4, 8)]
    return [
        Setting(f"K = {k}, M = {m}", k, batch, m, value, checkpoint="always")
        for (k, m), value in zip(keys, published, strict=True)
    ]


# arXiv 1811.06965, table 2; batch sizes of table 1.
TABLE_2 = [
    Published(
        "AmoebaNet-D (18, 256)",
        AMOEBANET,
        IMAGES_224,
        TPU,
        _paper(128, [1, 1.13, 1.38, 1.07, 1.26, 1.72, 1.21, 1.84, 3.48]),
    ),
    Published(
        "Transformer-48",
        partial(gpt, 48, 2048, 32, vocab=32000),
        tokens,
        TPU,
        _paper(32, [1, 1.07, 1.3, 1.7, 3.2, 4.8, 1.8, 3.4, 6.3]),
    ),
]
# arXiv 2004.09910; batches, chunks and balances of its benchmarks/{resnet101,unet,amoebanetd}-speed.
TORCHGPIPE = [
    Published(
        "ResNet-101",
        resnet101,
        IMAGES_224,
        P40,
        [
            Setting("plain", 0, 118, 1, 95.862),
            Setting("n = 1, m = 2", 1, 220, 2, 81.796, (370,)),
            Setting("n = 2, m = 1667", 2, 25000, 1667, 135.539, (135, 235)),
            Setting("n = 4, m = 256", 4, 5632, 256, 265.958, (44, 92, 124, 110)),
            Setting("n = 8, m = 150", 8, 5400, 150, 411.662, (26, 22, 33, 44, 44, 66, 66, 69)),
        ],
    ),
    Published(
        "U-Net (5, 64)",
        UNET,
        IMAGES_192,
        P40,
        [
            Setting("plain", 0, 40, 1, 28.5),
            Setting("n = 1, m = 2", 1, 80, 2, 24.456, (241,)),
            Setting("n = 2, m = 32", 2, 512, 32, 35.502, (104, 137)),
            Setting("n = 4, m = 16", 4, 512, 16, 67.042, (30, 66, 84, 61)),
            Setting("n = 8, m = 40", 8, 640, 40, 88.497, (16, 27, 31, 44, 22, 57, 27, 17)),
        ],
    ),
    Published(
        "AmoebaNet-D (18, 256)",
        AMOEBANET,
        IMAGES_224,
        P40,
        [
            Setting("n = 2, m = 1", 2, 96, 1, 26.733, (7, 17), "always"),
            Setting("n = 2, m = 4", 2, 256, 4, 41.133, (9, 15)),
            Setting("n = 2, m = 32", 2, 1280, 32, 47.386, (9, 15)),
            Setting("n = 4, m = 1", 4, 160, 1, 26.827, (3, 4, 5, 12), "always"),
            Setting("n = 4, m = 4", 4, 360, 4, 44.543, (3, 6, 7, 8)),
            Setting("n = 4, m = 32", 4, 1152, 32, 72.412, (3, 6, 7, 8)),
            Setting("n = 8, m = 1", 8, 196, 1, 24.918, (2, 2, 2, 2, 2, 3, 4, 7), "always"),
            Setting("n = 8, m = 4", 8, 480, 4, 70.065, (2, 2, 2, 3, 3, 4, 4, 4)),
            Setting("n = 8, m = 32", 8, 1280, 32, 132.413, (2, 2, 2, 3, 3, 4, 4, 4)),
        ],
    ),
]
_HEADERS = (
    "model | setting | simulated, samples/s | published | simulated speed-up | published speed-up | ratio"
)
_TPU_NOTE = """Throughput relative to K = 2, M = 1. Everything is recomputed; mini-batches have 128 images
of 224 x 224 or 32 x 1024 tokens, as in the paper's table 1. The Transformer has blocks of width 2048 with
32 heads, and 32,000 tokens. Layers are cut by their operations, or by their time where it says so: the paper
does not say how it estimates costs. No fill-drain schedule of one mini-batch size reaches the Transformer's
rows with M = 4: K M / (M + K - 1) is 1.60, 2.29 and 2.91. The rows of the paper must differ in their batches.
"""
_TORCHGPIPE_NOTE = """Batches, micro-batches and balances are those of torchgpipe's benchmark programs.
Speed-ups are relative to the first row of each model. The checkpoint mode is `except_last`, but `always` if
m = 1. Samples per second are limits of the data sheet. Shared PCIe switches, and the eight threads of one
Python process that launch the kernels, are not modelled.
"""


def main() -> None:
    def table(title: str, tables: Sequence[Published], note: str, by_time: bool = False) -> Table:
        return Table(title, _HEADERS, [row for each in tables for row in each.rows(by_time)], note)

    devices = [
        [d.name, d.flops / 1e12, d.memory / 1e9, d.link / 1e9, str(d.dtype).removeprefix("torch.")]
        for d in (P40, TPU)
    ]
    report(
        globals(),
        ["device", "TFLOP/s", "memory, GB/s", "link, GB/s", "type"],
        devices,
        [
            table("torchgpipe", TORCHGPIPE, _TORCHGPIPE_NOTE),
            table("GPipe, table 2: TPUs", TABLE_2, _TPU_NOTE),
            table("GPipe, table 2, AmoebaNet cut by time", TABLE_2[:1], "", by_time=True),
        ],
    )

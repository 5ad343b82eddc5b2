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
from functools import cache
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
from gpipe_fast.layers.skip import Key, declared, skip_scope


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
P100 = Device("Tesla P100", 9.3e12, 732e9, PCIE)
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


def entering(layers: Sequence[Cost], balance: Sequence[int], portals: bool = True) -> list[int]:
    """Returns the bytes that enter each stage: the output of the layer before it, and skip tensors.

    Args:
        layers: the costs of the layers.
        balance: the number of layers of each stage.
        portals: whether skip tensors go directly to the stage that pops them, and not through all between.
    """
    found, begin = [0], 0
    for size, next_size in pairwise(balance):
        begin += size
        stage = layers[begin : begin + next_size]
        skips = {key: num for layer in layers[:begin] for key, num in layer.stashed.items()}
        for key in (key for layer in layers[:begin] for key in layer.popped):
            del skips[key]
        popped = {key for layer in stage for key in layer.popped}
        crossing = sum(num for key, num in skips.items() if key in popped or not portals)
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
        overlap: whether copies overlap with computation.
        portals: as for `entering`.
    """

    name: str
    num_stages: int
    batch: int
    chunks: int
    published: float
    balance: tuple[int, ...] = ()
    checkpoint: str = "except_last"
    overlap: bool = True
    portals: bool = True


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
        crossing = [num / self.device.link for num in entering(layers, balance, setting.portals)]
        # A copy without a stream of its own takes the time of both stages. A stage has one neighbour or two.
        busy = [2 * (own + after) for own, after in zip(crossing, [*crossing[1:], 0.0], strict=True)]
        busy = [each / (2 if 0 < stage < len(busy) - 1 else 1) for stage, each in enumerate(busy)]
        return simulate(
            "gpipe",
            setting.num_stages,
            setting.chunks,
            forward=forward,
            backward=[2 * x for x in forward],
            weights=0.0,  # a boundary gradient is sent after the whole backward
            checkpoint=setting.checkpoint,
            transfer=0.0 if setting.overlap else busy,
            bandwidth=1.0,
            boundary_bytes=crossing if setting.overlap else 0.0,
        ).time

    def speeds(self, by_time: bool = False) -> list[float]:
        """Returns the simulated samples per second of each row; ``by_time`` as for `seconds`."""
        return [setting.batch / self.seconds(setting, by_time) for setting in self.settings]

    def rows(self) -> list[list[object]]:
        """Returns a row for each setting: samples per second and speed-ups, simulated and published."""
        found: list[list[object]] = []
        speeds = self.speeds()
        for setting, speed in zip(self.settings, speeds, strict=True):
            simulated, published = speed / speeds[0], setting.published / self.settings[0].published
            ratios = simulated, published, simulated / published
            found.append([self.model, setting.name, speed, setting.published, *ratios])
        return found

    def rows_by_cut(self) -> list[list[object]]:
        """Returns a row for each setting: its speed-up as published, and as simulated with both cuts."""
        found: list[list[object]] = []
        by_operations, by_time = self.speeds(), self.speeds(by_time=True)
        for i, setting in enumerate(self.settings):
            published = setting.published / self.settings[0].published
            first, second = by_operations[i] / by_operations[0], by_time[i] / by_time[0]
            found.append(
                [self.model, setting.name, published, first, first / published, second, second / published]
            )
        return found


@cache
def _costs(make: Any, sample: Any, size: int, device: Device) -> list[Cost]:
    with torch.device("meta"):
        x = sample(size)
        return costs(make().to(device.dtype), x.to(device.dtype) if x.is_floating_point() else x, device)


def amoebanet_256() -> nn.Sequential:
    return amoebanet_d(18, 256)


def amoebanet_128() -> nn.Sequential:
    return amoebanet_d(18, 128)


def transformer_48() -> nn.Sequential:
    return gpt(48, 2048, 32, vocab=32000)


def transformer_24() -> nn.Sequential:
    return gpt(24, 2048, 32, vocab=32000)


def unet_5_64() -> nn.Sequential:
    return unet(5, 64)


def images_224(size: int) -> Tensor:
    return torch.empty(size, 3, 224, 224)


def images_192(size: int) -> Tensor:
    return torch.empty(size, 3, 192, 192)


def tokens(size: int) -> Tensor:
    return torch.zeros(size, 1024, dtype=torch.long)


def _paper(batch: int, published: dict[tuple[int, int], float]) -> list[Setting]:
    """Returns rows by K and M; everything is recomputed."""
    return [
        Setting(f"K = {k}, M = {m}", k, batch, m, value, checkpoint="always")
        for (k, m), value in published.items()
    ]


def _keys(*chunks: int) -> list[tuple[int, int]]:
    return [(k, m) for m in chunks for k in (2, 4, 8)]


# arXiv 1811.06965, tables 2 and 3; batch sizes of table 1.
TABLE_2 = [
    Published(
        "AmoebaNet-D (18, 256)",
        amoebanet_256,
        images_224,
        TPU,
        _paper(
            128, dict(zip(_keys(1, 4, 32), [1, 1.13, 1.38, 1.07, 1.26, 1.72, 1.21, 1.84, 3.48], strict=True))
        ),
    ),
    Published(
        "Transformer-48",
        transformer_48,
        tokens,
        TPU,
        _paper(32, dict(zip(_keys(1, 4, 32), [1, 1.07, 1.3, 1.7, 3.2, 4.8, 1.8, 3.4, 6.3], strict=True))),
    ),
]
TABLE_3 = [
    Published(
        "AmoebaNet-D (18, 128)",
        amoebanet_128,
        images_224,
        P100,
        _paper(128, dict(zip(_keys(32), [1, 1.7, 2.7], strict=True))),
    ),
    Published(
        "Transformer-24",
        transformer_24,
        tokens,
        P100,
        _paper(32, dict(zip(_keys(32), [1, 1.8, 3.3], strict=True))),
    ),
]
# arXiv 2004.09910; batches, chunks and balances of its benchmarks/{resnet101,unet,amoebanetd}-speed.
TORCHGPIPE = [
    Published(
        "ResNet-101",
        resnet101,
        images_224,
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
        unet_5_64,
        images_192,
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
        amoebanet_256,
        images_224,
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
_TIMELINE: dict[str, Any] = {"num_stages": 4, "batch": 128, "chunks": 8, "balance": (34, 76, 70, 61)}
TIMELINE = [
    Published(
        "U-Net (5, 64)",
        unet_5_64,
        images_192,
        P40,
        [
            Setting("dependencies", published=41.306, overlap=False, portals=False, **_TIMELINE),
            Setting("and copy streams", published=55.191, portals=False, **_TIMELINE),
            Setting("and portals", published=58.477, **_TIMELINE),
        ],
    )
]


_BY_CUT = (
    "model | setting | published | cut by operations | ratio to published | cut by time | ratio to published"
)
_SPEEDS = (
    "model | setting | simulated, samples/s | published, samples/s | simulated "
    "speed-up | published speed-up | ratio"
)

_TPU_NOTE = """Throughput relative to K = 2, M = 1. Everything is recomputed; mini-batches have 128 images
of 224 x 224 or 32 x 1024 tokens, as in the paper's table 1. The Transformer has blocks of width 2048 with
32 heads, and 32,000 tokens. The paper cuts the layers so that the estimated costs of the stages vary least.
It does not say how the costs of AmoebaNet are estimated, so two cuts are tried, by operations and by time.

- M = 1: one stage computes at a time. Throughput grows a little with K, because a stage recomputes while it
  waits for its gradient. The paper has more for K = 8. Its batches were "adjusted to fit memory", and more
  devices have more memory; how is not published.
- Transformer, M = 32: if all stages take equally long, K M / (M + K - 1) = 6.56 is the limit for K = 8. The
  paper has 4% less. Here, the head takes as long as 1.2 blocks, so no cut makes the stages equal, and the
  first row hides a recompute.
- Transformer, M = 4: K M / (M + K - 1) is 1.60, 2.29 and 2.91, and the paper has 1.7, 3.2 and 4.8. No
  fill-drain schedule of one mini-batch size does this, so the rows of the paper must differ in their
  batches.
- AmoebaNet: stages with equal operations do not take equally long, because the first cells have large
  images and are bound by memory bandwidth. This is the imbalance that the paper names. With M = 32, it
  costs as much here as in the paper for K = 2 and 4, and more for K = 8. A cut by time removes most of it.
"""
_PCIE_NOTE = """M = 32, relative to K = 2; copies of boundary tensors overlap with computation. The paper
shows with this table that slow links hardly matter. In the simulation, infinitely fast ones would make K =
8 faster by 4% and 8% (AmoebaNet) and by 0.1% (Transformer).
"""
_TORCHGPIPE_NOTE = """Batches, micro-batches and balances are those of torchgpipe's benchmark programs.
Speed-ups are relative to the first row of each model. The checkpoint mode is `except_last`, but `always` if
m = 1.

- Samples per second are limits of the data sheet: the first rows reached 56% (AmoebaNet) to 98% (U-Net) of
  them.
- n = 1: one of two micro-batches is recomputed, so a step takes 3.5 instead of 3 forwards: 0.857.
- n = 8: the published speed-ups of ResNet-101 and U-Net are an eighth lower. Shared PCIe switches, and the
  eight threads of one Python process that launch the kernels, are not modelled.
- U-Net, n = 4: by these costs, the second stage of the published balance takes a third of the time, which
  is more than it can have taken on a P40.
- AmoebaNet, n = 4, m = 4: the published figure is low beside its neighbours, and nothing here explains it.
"""
_TIMELINE_NOTE = """Four P40, 128 images in 8 micro-batches, relative to the first row. Without copy
streams, a copy takes the time of both stages. Without portals, skip tensors pass through all stages
between. The row without dependencies (30.7 samples/s) has no schedule, because autograd chooses the order
of its backwards.
"""


def main() -> None:
    tables = [
        Table("torchgpipe", _SPEEDS, [row for each in TORCHGPIPE for row in each.rows()], _TORCHGPIPE_NOTE),
        Table(
            "torchgpipe's ablation",
            _SPEEDS,
            [row for each in TIMELINE for row in each.rows()],
            _TIMELINE_NOTE,
        ),
        Table(
            "GPipe, table 2: TPUs", _BY_CUT, [r for each in TABLE_2 for r in each.rows_by_cut()], _TPU_NOTE
        ),
        Table(
            "GPipe, table 3: GPUs without NVLink",
            _BY_CUT,
            [row for each in TABLE_3 for row in each.rows_by_cut()],
            _PCIE_NOTE,
        ),
    ]
    devices = [
        [
            each.name,
            each.flops / 1e12,
            each.memory / 1e9,
            each.link / 1e9,
            str(each.dtype).removeprefix("torch."),
        ]
        for each in (P40, P100, TPU)
    ]
    report(globals(), ["device", "TFLOP/s", "memory, GB/s", "link, GB/s", "type"], devices, tables)

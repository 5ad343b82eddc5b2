"""The stages whose fusion is counted, traced for a GPU without running an operator."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn

from bench.models import bert, gpt, gpt2, head, llama, resnet, unet, vit
from gpipe_fast.trace import fake
from gpipe_fast.trace.joint_graph import JointGraph
from gpipe_fast.trace.layers_function import TraceContext
from gpipe_fast.trace.trace import trace

DEVICE = torch.device("cuda:0")


@dataclass(frozen=True)
class Size:
    """Sizes of a stage.

    Attributes:
        batch: samples of a micro-batch.
        length: positions of a sequence; images have ``length / 8`` rows and columns.
        width: the width of the residual stream; images have ``width / 4`` channels.
        heads: attention heads.
        vocab: classes of the cross-entropy.
    """

    batch: int
    length: int
    width: int
    heads: int
    vocab: int


SMALL = Size(batch=2, length=16, width=32, heads=4, vocab=64)
LARGE = Size(batch=4, length=512, width=1024, heads=16, vocab=32000)


@dataclass(frozen=True)
class Precision:
    """The dtype of parameters and floating-point inputs, and the dtype of autocast or None."""

    parameters: torch.dtype
    autocast: torch.dtype | None = None

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Enters the autocast mode; use it around the forward."""
        with torch.autocast("cuda", self.autocast, self.autocast is not None, cache_enabled=False):
            yield


PRECISIONS = {
    "fp32": Precision(torch.float32),
    "bf16": Precision(torch.bfloat16),
    "autocast": Precision(torch.float32, torch.bfloat16),
}


@dataclass(frozen=True)
class Stage:
    """One stage of a model.

    Attributes:
        layers: makes the stage's layers.
        inputs: makes one micro-batch of inputs on the current device, in the given dtype. Floating-point
            inputs that are no constants of the model require a gradient.
    """

    layers: Callable[[Size], list[nn.Module]]
    inputs: Callable[[Size, torch.dtype], list[Tensor]]


def _hidden(size: Size, dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty(size.batch, size.length, size.width, dtype=dtype, requires_grad=True)]


def _hidden_and_positions(size: Size, dtype: torch.dtype) -> list[Tensor]:
    tables = (torch.empty(1, size.length, size.width // size.heads, dtype=dtype) for _ in range(2))
    return [*_hidden(size, dtype), *tables]


def _hidden_and_targets(size: Size, dtype: torch.dtype) -> list[Tensor]:
    return [*_hidden(size, dtype), torch.empty(size.batch, size.length, dtype=torch.int64)]


def _images(size: Size, dtype: torch.dtype, scale: int = 1) -> list[Tensor]:
    shape = (size.batch, size.width // 4, *(scale * size.length // 8,) * 2)
    images = torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)
    return [images.requires_grad_()]


def _llama(size: Size) -> list[nn.Module]:
    return [llama.Block(size.width, size.heads, size.heads // 2, size.width * 11 // 4)]


def _bottleneck(size: Size) -> list[nn.Module]:
    block = resnet.bottleneck(size.width // 4, size.width // 16, stride=1)
    return list(block.to(memory_format=torch.channels_last))


def _unet(size: Size) -> list[nn.Module]:
    channels = size.width // 4
    model = unet.unet(1, channels, depth=1, in_channels=channels, out_channels=channels)
    return list(model.to(memory_format=torch.channels_last))


STAGES = {
    "GPT": Stage(lambda s: [gpt.Block(s.width, s.heads)], _hidden),
    "GPT, 4 blocks": Stage(lambda s: list(gpt.blocks(4, s.width, s.heads)), _hidden),
    "GPT-2": Stage(lambda s: [gpt2.Block(s.width, s.heads)], _hidden),
    "GPT-2, attention dropout": Stage(
        lambda s: [gpt2.Block(s.width, s.heads, attention_dropout=0.1)], _hidden
    ),
    "Llama": Stage(_llama, _hidden_and_positions),
    "ViT": Stage(lambda s: [vit.Block(s.width, s.heads)], _hidden),
    "BERT": Stage(lambda s: [bert.Block(s.width, s.heads)], _hidden),
    "head": Stage(lambda s: [head.Head(s.width, s.vocab)], _hidden_and_targets),
    "head, upcast": Stage(lambda s: [head.Head(s.width, s.vocab, upcast=True)], _hidden_and_targets),
    "ResNet": Stage(_bottleneck, _images),
    # Its inner images have half as many rows and columns, and need more than one.
    "U-Net": Stage(_unet, functools.partial(_images, scale=2)),
}


def trace_stage(stage: Stage, precision: Precision, size: Size) -> JointGraph:
    """Traces a stage on a GPU, which may be the fake one of tests/fake_cuda. No operator runs.

    Parameters are allocated, but never written, so that the operating system does not provide their memory.
    Strides of results are those of PyTorch's fake kernels: they are not compared with the real kernels'.

    Raises:
        Untraceable: the stage cannot be traced.
    """
    with torch.device("meta"):
        layers = stage.layers(size)
    layers = [layer.to(precision.parameters).to_empty(device=DEVICE) for layer in layers]
    with torch.device(DEVICE):
        inputs: Sequence[Tensor] = stage.inputs(size, precision.parameters)
    with mock.patch.object(fake, "_may_differ_from_real", return_value=False), precision.enter():
        return trace(layers, inputs, trace_context=TraceContext(device=DEVICE))

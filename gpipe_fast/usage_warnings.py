"""Warnings about calls that work but are probably unintended."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from gpipe_fast.layers.layer_title import layer_title
from gpipe_fast.layers.structure import BatchDims, Inputs
from gpipe_fast.schedule import bubble
from gpipe_fast.user_warning import warn_user


@functools.cache
def warn_idle_stages(num_stages: int, chunks: int, num_samples: int) -> None:
    """Warns of too few micro-batches, once per process and set of numbers.

    The registry of `warnings` does not suffice: any change of its filters clears it, and PyTorch makes some.

    Args:
        num_stages: K, at least 2.
        chunks: M.
        num_samples: the number of samples, which is the maximum number of micro-batches.
    """
    stages = f"{num_stages} stages"
    few = f"1 micro-batch on {stages} leaves" if chunks == 1 else f"{chunks} micro-batches on {stages} leave"
    idle = f"{few} the stages idle for up to {bubble(num_stages, chunks):.0%} of a step"
    enough = min(4 * num_stages, num_samples)
    if enough <= chunks:
        samples = "1 sample" if num_samples == 1 else f"{num_samples} samples"
        warn_user(
            f"{idle}, and a mini-batch of {samples} has no more micro-batches; pass more samples at once"
        )
    else:
        less = f"{bubble(num_stages, enough):.0%}"
        warn_user(
            f"{idle}; chunks={enough} or chunks='auto' would reduce it to {less}, but smaller micro-batches "
            "can compute more slowly: model.report(...) predicts which number is fastest"
        )


def warn_surplus_devices(num_devices: int, num_layers: int) -> None:
    """Warns of devices that get no stage, because there are more of them than layers.

    Args:
        num_devices: how many devices the user has passed.
        num_layers: the number of layers.
    """
    if num_devices > num_layers > 0:
        warn_user(
            f"{num_devices} devices were passed for {num_layers} layers, and a stage has at least one layer, "
            f"so the last {num_devices - num_layers} stay idle; pass {num_layers} devices, or split layers "
            "into smaller ones"
        )


def warn_sequence_first(stages: Iterable[Sequence[nn.Module]], dims: BatchDims) -> None:
    """Warns of torch.nn layers that expect the sequence first, if inputs are split along dimension 0.

    Only layers of the pipeline itself and of nested ``Sequential`` modules are checked: another module may
    transpose its input before it calls such a layer.

    Args:
        stages: the layers of each stage.
        dims: the dimensions along which inputs are split.
    """
    if 0 not in dims.inputs:
        return
    number = 0
    for index, layers in enumerate(stages):
        for layer in layers:
            kind = next(
                (type(m).__name__ for m in _flatten_sequentials(layer) if _takes_sequence_first(m)), None
            )
            if kind is not None:
                warn_user(
                    f"stage {index}, {layer_title(number, layer)}: {kind} has batch_first=False, but "
                    "micro-batches are split along dimension 0, its time dimension unless an earlier "
                    "layer transposes the input; pass batch_dim=1 to GPipe, or batch_first=True to the layer"
                )
            number += 1


def warn_square_input(inputs: Inputs) -> None:
    """Warns of a square input that is split: a mask of positions, if there are as many of them as samples.

    Args:
        inputs: the arguments of a call.
    """
    batch, *others = inputs.tensors[0].shape
    for index, (tensor, dim) in enumerate(zip(inputs.tensors, inputs.dims.inputs, strict=True)):
        if index and dim == 0 and batch in others[:1] and tuple(tensor.shape) == (batch, batch):
            warn_user(
                f"input {index} of shape {list(tensor.shape)} is split into micro-batches, because its first "
                "dimension has the batch's size; if that is by chance, as of a mask of positions, wrap it in "
                "gpipe_fast.replicate(...)"
            )


def _flatten_sequentials(layer: nn.Module) -> Iterator[nn.Module]:
    if isinstance(layer, nn.Sequential):
        for inner in layer:
            yield from _flatten_sequentials(inner)
    else:
        yield layer


def _takes_sequence_first(module: nn.Module) -> bool:
    if isinstance(module, (nn.TransformerEncoder, nn.TransformerDecoder)):
        return any(map(_takes_sequence_first, module.layers))
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        module = module.self_attn
    known = isinstance(module, (nn.RNNBase, nn.MultiheadAttention, nn.Transformer))
    return known and not module.batch_first

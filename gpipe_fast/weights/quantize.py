"""Quantization of the weights of a model of transformers while they are loaded, by its own operations.

Each weight is read, moved to the device of its stage, and quantized there, before the next one is read.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast.layers.quantized import stand_in
from gpipe_fast.weights.lazy_tensor import Quantize, as_meta


def prepare_quantization(model: Any, config: Any) -> dict[int, Quantize]:
    """Replaces the linear layers of a model by layers for quantized weights, without data.

    Args:
        model: a model of transformers.
        config: the ``quantization_config`` that `from_pretrained` takes.

    Returns:
        For each parameter that is to be quantized, by ``id``, a function that reads and sets it.

    Raises:
        TypeError: the model or the configuration is none of transformers.
    """
    if not hasattr(model, "base_model_prefix") or not hasattr(config, "quant_method"):
        raise TypeError(
            f"quantization_config is for models of transformers, got {type(config).__name__} for a "
            f"{type(model).__name__}; pass a BitsAndBytesConfig or a TorchAoConfig, or leave it out"
        )
    if getattr(model, "hf_quantizer", None) is None:  # else, an earlier load has failed after this
        quantizer = importlib.import_module("transformers.quantizers").AutoHfQuantizer.from_config(config)
        quantizer.validate_environment(device_map=None)
        with _default_dtype(model.dtype):  # of biases
            quantizer.preprocess_model(model=model, device_map=None)
        quantizer.postprocess_model(model)
        model.hf_quantizer = quantizer
    found: dict[int, Quantize] = {}
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta and model.hf_quantizer.param_needs_quantization(model, name):
            # Classes of parameters may intercept the copies that `load_state_dict` makes.
            plain = nn.Parameter(torch.empty(parameter.shape, dtype=model.dtype, device="meta"), False)
            vars(plain).update(vars(parameter))
            _set(model, name, plain)
            found[id(plain)] = functools.partial(_quantize, model, name)
    return found


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _quantize(model: Any, name: str, read: Callable[[], Tensor], device: torch.device) -> None:
    """Reads and sets a parameter; of a stage in another process, its form alone, on the meta device."""
    is_own = device.type != "meta"
    empty = model.get_parameter(name)
    value = read().to(device, empty.dtype) if is_own else torch.zeros_like(empty, device="cpu")
    found = model.hf_quantizer.get_quantize_ops().convert(
        {name: [value]}, full_layer_name=name, model=model, missing_keys=set()
    )
    made = found.get(name, model.get_parameter(name))  # the operation may have set it
    _set(model, name, made if is_own else stand_in(made, as_meta))


def _set(model: nn.Module, name: str, parameter: Any) -> None:
    path, _, own = name.rpartition(".")
    model.get_submodule(path)._parameters[own] = parameter

"""Loads weights into the layers of stages, one tensor at a time; layers on the meta device get memory first.

A load has three parts. The first two may be refused; until then, nothing is loaded::

    trial       nn.Module.load_state_dict, with lazy tensors that note what would be copied
    initialise  init(module), for modules with meta tensors that the source lacks
    load        nn.Module.load_state_dict, with lazy tensors that are read and copied
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Set
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast.layers.quantized import stand_in
from gpipe_fast.weights.conversion import converted
from gpipe_fast.weights.lazy_tensor import (
    Entry,
    LazyTensor,
    Targets,
    as_meta,
    check_has_no_hooks,
    entry_of,
    making_data,
    replace,
)
from gpipe_fast.weights.quantize import prepare_quantization
from gpipe_fast.weights.source import Source, entries_of

Placement = Iterable[tuple[nn.Module, torch.device]]
Initialize = Callable[[nn.Module], object]


def load_weights(
    module: nn.Module,
    source: Source,
    placement: Callable[[], Placement],
    strict: bool,
    init: Initialize | None,
    quantization_config: Any = None,
) -> Any:
    """Loads weights as `GPipe.load_weights` does.

    Args:
        module: the module with all layers.
        source: a state dict or the path of a file.
        placement: returns the partitions and the device of each.
        strict: whether the names in the source must be those of the module's state dict.
        init: initialises a module that has meta tensors which the source lacks.
        quantization_config: how a model of transformers quantizes each tensor; None: not at all.

    Raises:
        TypeError: `init` is not a function, or the model cannot be quantized.
        RuntimeError: the source does not fit the module, `init` is needed, or a tensor cannot be loaded.
    """
    if init is not None and not callable(init):
        raise TypeError(
            f"init must be a function of a module, got {type(init).__name__}; pass a function such as "
            "init=lambda module: module.reset_parameters()"
        )
    entries = converted(module, entries_of(source))
    quantizers = prepare_quantization(module, quantization_config) if quantization_config else {}
    _add_tied_names(module, entries)
    trial = Targets(_devices(placement()), is_trial=True)
    with warnings.catch_warnings():
        # A module such as a batch norm of an old state dict adds a tensor itself; it then counts as absent.
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
        _load(module, entries, trial, strict)
    # Stages in other processes stay on the meta device.
    trial.copied |= {key for key, device in trial.devices.items() if device.type == "meta"}
    absent = _absent_names(module, trial.copied)
    if absent and init is None:
        raise RuntimeError(
            f"the source lacks {', '.join(absent)}, on the meta device; pass init=function, which is called "
            "with each module that has such tensors, after they got memory, and sets them, such as "
            "init=lambda module: module.reset_parameters()"
        )
    if init is not None:
        _initialize(module, trial, init)
    return _load(module, entries, Targets(_devices(placement()), quantizers=quantizers), strict)


def make_lazy(state: MutableMapping[str, Any], prefix: str, placement: Placement) -> None:
    """Replaces tensors of a state dict by lazy ones, so that `nn.Module.load_state_dict` fills meta tensors.

    Args:
        state: the state dict, which is changed in place.
        prefix: the beginning of the names of the partitions' tensors.
        placement: the partitions, and the device of each.
    """
    targets = Targets(_devices(placement))
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, Tensor) and not isinstance(value, LazyTensor):
            state[name] = LazyTensor.of(entry_of(value), targets)


def forget_data(partition: nn.Module, replaced: dict[Tensor, Tensor]) -> None:
    """Puts parameters and buffers on the meta device, which frees their memory.

    Tensors that are ``replaced`` already, by themselves or by others, stay tied; new ones are added.
    """
    for module in partition.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or tensor.is_meta:
                    continue
                if tensor not in replaced:
                    replaced[tensor] = stand_in(tensor, as_meta)
                table[name] = replaced[tensor]


def has_meta_tensors(module: nn.Module) -> bool:
    """Returns whether a parameter or a buffer is on the meta device."""
    return any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers()))


def _load(module: nn.Module, entries: Mapping[str, Any], targets: Targets, strict: bool) -> Any:
    state = OrderedDict(
        (name, LazyTensor.of(entry, targets) if isinstance(entry, Entry) else entry)
        for name, entry in entries.items()
    )
    metadata = getattr(entries, "metadata", None)
    if metadata is not None:
        state._metadata = metadata  # type: ignore[attr-defined]
    return nn.Module.load_state_dict(module, state, strict)


def _add_tied_names(module: nn.Module, entries: MutableMapping[str, Any]) -> None:
    """Adds the names of tied tensors of which the source has one: safetensors files store them once."""
    names: dict[int, list[str]] = {}
    for name, tensor in _named_tensors(module):
        names.setdefault(id(tensor), []).append(name)
    for tied in names.values():
        present = [name for name in tied if name in entries]
        if present:
            entries.update((name, entries[present[0]]) for name in tied if name not in entries)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that a state dict has, with their names; tied ones once for each name."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for name, tensor in chain(owner._parameters.items(), owner._buffers.items()):
            if tensor is not None and name not in owner._non_persistent_buffers_set:
                yield f"{path}.{name}", tensor


def _devices(placement: Placement) -> dict[int, torch.device]:
    """Returns the device for each tensor; for one that partitions share, that of the last of them here."""
    return {
        id(tensor): device
        for partition, device in sorted(placement, key=lambda pair: pair[1].type != "meta")
        for tensor in chain(partition.parameters(), partition.buffers())
    }


def _absent_names(module: nn.Module, copied: Set[int]) -> list[str]:
    """Returns the names of the meta tensors besides the copied ones; of a tied tensor, the first."""
    found: dict[int, str] = {}
    for path, owner in module.named_modules():
        for name, tensor in _absent(owner, copied).items():
            found.setdefault(id(tensor), f"{path}.{name}")
    return list(found.values())


def _absent(owner: nn.Module, copied: Set[int]) -> dict[str, Tensor]:
    """Returns a module's own meta tensors besides the copied ones, by name."""
    own = chain(owner._parameters.items(), owner._buffers.items())
    return {name: t for name, t in own if t is not None and t.is_meta and id(t) not in copied}


def _has_other_meta_tensors(owner: nn.Module) -> bool:
    """Returns whether a plain attribute is a meta tensor. A hook may compute it, so it need not be set."""
    return any(isinstance(value, Tensor) and value.is_meta for value in vars(owner).values())


def _initialize(module: nn.Module, trial: Targets, init: Initialize) -> None:
    """Gives memory to the tensors that the source lacks, and initialises them, module by module.

    If that fails, all of them are on the meta device again, so that another `init` sets all of them.
    """
    given: list[Tensor] = []
    try:
        with making_data():
            for path, owner in module.named_modules():
                absent = _absent(owner, trial.copied)
                if absent or _has_other_meta_tensors(owner):
                    given += absent.values()
                    _initialize_module(path, owner, absent, trial.devices, init)
    except BaseException:
        for tensor in given:
            if not tensor.is_meta:
                replace(tensor, torch.empty_like(tensor, device="meta"))
        raise


def _initialize_module(
    path: str,
    owner: nn.Module,
    absent: Mapping[str, Tensor],
    devices: Mapping[int, torch.device],
    init: Initialize,
) -> None:
    for tensor in absent.values():
        check_has_no_hooks(tensor)
        data = torch.empty_like(tensor, device=devices[id(tensor)])
        # NaN shows which elements are not initialised.
        replace(tensor, data.fill_(float("nan") if _may_be_nan(tensor) else 0))
    versions = {name: tensor._version for name, tensor in absent.items()}
    init(owner)
    left = []
    for name, tensor in absent.items():
        now = getattr(owner, name, None)
        is_untouched = now is tensor and tensor._version == versions[name]
        if isinstance(now, Tensor) and _is_unset(now, is_untouched):
            left.append(f"{path}.{name}")
    if left:
        raise RuntimeError(
            f"init left {', '.join(left)} on the meta device or with NaN, or did not write to it; let it set "
            "every element of tensors that the source lacks"
        )


def _may_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_unset(tensor: Tensor, is_untouched: bool) -> bool:
    """Returns whether elements are not initialised. Integers have no NaN: they are set if one was written."""
    if tensor.is_meta:
        return True
    if _may_be_nan(tensor):
        return bool(tensor.isnan().any())
    # A write through `tensor.data` is not counted as one.
    return is_untouched and tensor.numel() > 0 and not tensor.bool().any()

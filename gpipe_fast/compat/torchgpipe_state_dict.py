"""Conversion of torchgpipe's state dicts to the keys of the plain Sequential."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any

from torch import nn

from gpipe_fast.torch_private.modules import AnyBatchNorm

# Buffers that torchgpipe's deferred batch norm has in addition to those of a batch norm.
_SUM_BUFFERS = ("sum", "sum_squares")


def rename_keys(state: MutableMapping[str, Any], prefix: str, module: nn.Module) -> None:
    """Renames or removes the keys that only torchgpipe has, in place.

    ::

        partitions.1.2.running_mean   2.running_mean
        partitions.1.2.sum            (removed: a buffer of torchgpipe's deferred batch norm)

    Args:
        state: a state dict; may contain keys outside of ``prefix``.
        prefix: the prefix of ``module``'s own keys: empty, or ending with a dot.
        module: the module whose layers the keys name, whatever the partitions were.
    """
    in_partition = re.compile(re.escape(prefix) + r"partitions\.\d+\.")
    for key in list(state):
        if not key.startswith(prefix):
            continue
        match = in_partition.match(key)
        name = prefix + key[match.end() :] if match else key
        if name not in state:
            state[name] = state.pop(key)
        owner, _, last = name[len(prefix) :].rpartition(".")
        if last in _SUM_BUFFERS and _is_batch_norm(module, owner, last):
            state.pop(name, None)


def _is_batch_norm(module: nn.Module, path: str, attribute: str) -> bool:
    """Returns whether the module at `path` is a batch norm without this attribute."""
    try:
        found = module.get_submodule(path)
    except AttributeError:
        return False
    return isinstance(found, AnyBatchNorm) and not hasattr(found, attribute)

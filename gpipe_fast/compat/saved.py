"""State dicts that torchgpipe saved, read as those of the plain Sequential."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

# What torchgpipe's deferred batch norm keeps beside the buffers of a batch norm.
_SUMS = ("sum", "sum_squares")


def rename(state: MutableMapping[str, Any], prefix: str, module: nn.Module) -> None:
    """Drops what torchgpipe has more, in place.

    ::

        partitions.1.2.running_mean   2.running_mean
        partitions.1.2.sum            (of deferred batch norm; none)

    Args:
        state: everything below ``prefix`` at least.
        prefix: that of ``module``'s own keys, empty or with a dot at its end.
        module: has the layers that the names are of, whatever the partitions were.
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
        if last in _SUMS and _is_batch_norm(module, owner, last):
            state.pop(name, None)


def _is_batch_norm(module: nn.Module, path: str, own: str) -> bool:
    """Whether there is one, without such a tensor of its own."""
    try:
        found = module.get_submodule(path)
    except AttributeError:
        return False
    return isinstance(found, _BatchNorm) and not hasattr(found, own)

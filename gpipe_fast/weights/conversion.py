"""Tensors of files of transformers that its models have under other names, or stacked and concatenated.

Files of Mixtral, for example, have three matrices of each expert, and the model one tensor of all experts.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from gpipe_fast.weights.lazy_tensor import Entry, entry_of
from gpipe_fast.weights.source import Entries


def converted(module: nn.Module, entries: Entries) -> Entries:
    """Returns the entries as transformers would load them into one of its models; else the same ones.

    Args:
        module: the module to load into.
        entries: those of the source. They stay as they are if their names are the module's.
    """
    mapping = sys.modules.get("transformers.conversion_mapping")  # since transformers 5
    names = module.state_dict().keys()
    if mapping is None or not hasattr(module, "base_model_prefix") or entries.keys() <= names:
        return entries
    loading: Any = sys.modules["transformers.core_model_loading"]
    transforms = mapping.get_model_conversion_mapping(module)
    converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
    renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found, groups = Entries(), dict[str, list[tuple[str, Entry]]]()
    found.metadata = entries.metadata
    state = dict.fromkeys(names, True)
    for name in sorted(entries, key=loading.dot_natural_key):  # experts in the order of their numbers
        target, pattern = loading.rename_source_key(
            name, renamings, converters, module.base_model_prefix, state
        )
        if name in state or target not in state:
            found[name] = entries[name]
        elif pattern is None:
            found[target] = entries[name]
        else:
            groups.setdefault(target, []).append((pattern, entries[name]))
    for target, parts in groups.items():
        converter = by_pattern[parts[0][0]]
        trial = [(pattern, entry_of(each.like)) for pattern, each in parts]
        for key, like in _convert(module, converter, target, trial).items():
            found[key] = Entry(like, functools.partial(_convert_one, module, converter, target, parts, key))
    return found


def _convert_one(
    module: Any, converter: Any, target: str, parts: Sequence[tuple[str, Entry]], name: str
) -> Tensor:
    return _convert(module, converter, target, parts)[name]


def _convert(
    module: Any, converter: Any, target: str, parts: Sequence[tuple[str, Entry]]
) -> dict[str, Tensor]:
    """Returns what a converter makes of some tensors, by name."""
    own = copy.deepcopy(converter)
    for pattern, entry in parts:
        own.add_tensor(target, target, pattern, entry.read)
    found = own.convert(target, model=module, config=module.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}

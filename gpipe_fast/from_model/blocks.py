"""Finds the blocks of a model: the modules at which it is cut into layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

from torch import nn

from gpipe_fast.from_model.dataflow import CannotCut, Dataflow

# What `blocks=` names: modules or classes of modules, or the names of modules.
Blocks = str | nn.Module | type[nn.Module] | Iterable[Any]

# Records a call of the model, given the modules that are recorded by what they call, and the blocks.
RecordCalls = Callable[[Set[nn.Module], Set[nn.Module]], Dataflow]


def opened_for(model: nn.Module, blocks: Iterable[nn.Module]) -> set[nn.Module]:
    """Returns the modules that contain blocks, which are recorded by what they call."""
    wanted = set(blocks)
    inside = {inner for block in wanted for inner in block.modules()}
    found = {m for m in model.modules() if m not in inside and not wanted.isdisjoint(m.modules())}
    return found | {model}


def named_blocks(model: nn.Module, blocks: Blocks) -> list[nn.Module]:
    """Returns the modules that the user names as blocks; a list of modules stands for its children.

    Raises:
        TypeError: something else than names, modules and classes was passed.
        ValueError: there is no such module, or a block is inside of another.
    """
    entries = [blocks] if isinstance(blocks, (str, nn.Module, type)) else list(blocks)
    found: list[nn.Module] = []
    for entry in entries:
        found += _modules_of(model, entry)
    if not found:
        raise ValueError(f"blocks={blocks!r} names no module")
    names = {module: name for name, module in model.named_modules()}
    for block in found:
        inner = next((m for m in found if m is not block and m in set(block.modules())), None)
        if inner is not None:
            outer = names[block] or type(block).__name__
            raise ValueError(f"block {names[inner]} is inside of block {outer}; name one of them")
    return list(dict.fromkeys(found))


def _modules_of(model: nn.Module, entry: Any) -> list[nn.Module]:
    if isinstance(entry, str):
        known = dict(model.named_modules())
        if entry not in known:
            lists = [name for name, m in known.items() if isinstance(m, nn.ModuleList | nn.Sequential)]
            raise ValueError(f"blocks: the model has no module {entry!r}; its lists are {lists}")
        entry = known[entry]
    if isinstance(entry, type) and issubclass(entry, nn.Module):
        found = [m for m in model.modules() if isinstance(m, entry)]
        if not found:
            raise ValueError(f"blocks: the model has no module of class {entry.__name__}")
        return found
    if not isinstance(entry, nn.Module):
        raise TypeError(
            f"blocks must be names of modules, modules or classes of modules, got {type(entry).__name__}"
        )
    if entry not in set(model.modules()):
        raise ValueError(f"blocks: a {type(entry).__name__} was passed that is no module of the model")
    return list(entry.children()) if _is_list(entry) else [entry]


def check_calls(flow: Dataflow, blocks: Sequence[nn.Module], names: dict[nn.Module, str]) -> None:
    """Checks that a call of the model calls the blocks in their order, each as often as it is one.

    Raises:
        CannotCut: it does not.
    """
    called = _called(flow, set(blocks))
    times, wanted = Counter(called), Counter(blocks)
    for block in blocks:
        if times[block] != wanted[block]:
            how = "is not called" if not times[block] else f"is called {times[block]} times"
            raise CannotCut(f"block {names[block]} ({type(block).__name__}) {how} in a call of the model")
    if called != list(blocks):
        at = next(i for i, (a, b) in enumerate(zip(called, blocks, strict=True)) if a is not b)
        raise CannotCut(
            f"blocks are called out of order: {names[called[at]]} comes before {names[blocks[at]]}"
        )


def find_blocks(model: nn.Module, record: RecordCalls, needed: int) -> tuple[list[nn.Module], set[nn.Module]]:
    """Finds blocks by recording which modules run: children of lists, or else children of the model.

    Args:
        model: the model.
        record: records a call of the model.
        needed: how many blocks there should be.

    Returns:
        The blocks in the order of their calls, and the modules that are recorded by what they call.

    Raises:
        CannotCut: there are none.
    """
    lists = list(_outer_lists(model))
    found: list[nn.Module] = []
    while lists:
        flow = _recorded(model, record, lists)
        runs = _without_small_sequences([x for x in lists if _called(flow, set(x)) == list(x)], needed)
        found = max(found, _called(flow, {child for each in runs for child in each}), key=len)
        if len(found) >= max(needed, 2):
            break
        # Lists in place of their children that contain lists.
        inner = [lower for each in lists for child in each for lower in _outer_lists(child)]
        if not inner:
            break
        lists = inner
    if len(found) >= 2:
        return found, opened_for(model, found)
    return _children_as_blocks(model, record, needed)


def _recorded(model: nn.Module, record: RecordCalls, lists: Sequence[nn.Module]) -> Dataflow:
    """Records a call with the children of all lists as blocks; of the largest list alone, if it must be."""
    candidates = {child for each in lists for child in each.children()}
    try:
        return record(opened_for(model, candidates), candidates)
    except CannotCut:
        if len(lists) < 2:
            raise
    candidates = set(max(lists, key=_num_elements).children())
    return record(opened_for(model, candidates), candidates)


def _without_small_sequences(lists: list[nn.ModuleList], needed: int) -> list[nn.ModuleList]:
    """Leaves out sequences that are smaller than a block, as of a timestep's layers, if there are blocks."""
    blocks = [child for each in lists if isinstance(each, nn.ModuleList) for child in each]
    if len(blocks) < max(needed, 2):
        return lists
    least = min(map(_num_elements, blocks))
    return [each for each in lists if isinstance(each, nn.ModuleList) or _num_elements(each) >= least]


def _num_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _children_as_blocks(
    model: nn.Module, record: RecordCalls, needed: int
) -> tuple[list[nn.Module], set[nn.Module]]:
    """Finds blocks by opening the largest module again and again, until no block is too large for a stage."""
    opened: set[nn.Module] = {model}
    closed: set[nn.Module] = set()
    best: list[nn.Module] = []
    while True:
        try:
            flow = record(opened | closed, set())
        except Exception:
            if not best:
                raise
            return best, opened
        opened = opened | closed
        best = [c.target for c in flow.calls if c.is_module and any(True for _ in c.target.parameters())]
        costs = {module: _num_elements(module) for module in best}
        total = sum(costs[module] for module in best)
        large = [m for m in costs if costs[m] * needed > total and any(True for _ in m.children())]
        if not large and len(best) < max(needed, 2):
            large = [m for m in costs if any(True for _ in m.children())]
        if not large:
            break
        closed = {max(large, key=costs.__getitem__)}
    if len(best) < 2:
        raise CannotCut(f"{type(model).__name__} calls no two modules between which it could be cut")
    return best, opened


def _is_list(module: nn.Module) -> bool:
    """Returns whether a module is a list of modules, or calls its children one after the other."""
    plain = type(module).forward is nn.Sequential.forward
    return isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and plain)


def _outer_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """Returns the lists of two or more modules in a module that are in no other such list."""
    if _is_list(module) and len(list(module.children())) > 1:
        yield module  # type: ignore[misc]
        return
    for child in module.children():
        yield from _outer_lists(child)


def _called(flow: Dataflow, modules: Set[nn.Module]) -> list[nn.Module]:
    return [call.target for call in flow.calls if call.is_module and call.target in modules]

"""Compares the layouts that a trace predicts with those of real results, for all operators of PyTorch.

The calls are those of PyTorch's own database of operators, forward and backward, on arguments in random
layouts and dtypes. Each entry runs in a child of a fork, because some kernels of PyTorch read out of bounds
then (pytorch#197888). Importing the database changes settings of PyTorch: run this in a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import pickle
import random
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gpipe_fast.torch_private.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    logging_disabled,
)
from gpipe_fast.trace.fake import RealLayouts
from tests.layouts import in_another_layout

Call = tuple[Any, Any, Any]  # an operator, its arguments and its keyword arguments


class RecordCalls(TorchDispatchMode):
    """Records the calls of functional operators and views of strided tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if not func._schema.is_mutable and not is_random and all(t.layout is torch.strided for t in tensors):
            self.calls.append((func, *tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs))))
        return func(*args, **kwargs)


def calls_of(entry: Any, samples: int) -> Iterator[Call]:
    """Yields the calls of an entry of the database, forward and backward."""
    dtype = torch.float32 if torch.float32 in entry.dtypes else min(entry.dtypes, key=str)
    differentiable = entry.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    inputs = entry.sample_inputs("cpu", dtype, requires_grad=differentiable)
    for given in itertools.islice(inputs, samples):
        values = (given.input, given.args, given.kwargs)
        record = RecordCalls()
        try:
            with record:
                results = tree_leaves(entry(given.input, *given.args, **given.kwargs))
                outputs = [t for t in results if isinstance(t, Tensor) and t.requires_grad]
                leaves = [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.requires_grad]
                gradients = [torch.randn_like(output) for output in outputs]
                if outputs and leaves:
                    torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
        except Exception:  # the database has samples that PyTorch refuses
            pass
        yield from record.calls


def layouts(values: Any) -> list[object]:
    tensors = (t for t in tree_leaves(values) if isinstance(t, Tensor) and t.layout is torch.strided)
    return [(tuple(t.shape), t.stride(), t.dtype) for t in tensors]


def in_another_dtype(rng: random.Random, tensor: Tensor) -> Tensor:
    """Returns a tensor of floating point numbers in a random dtype, half of them as they are."""
    if not tensor.is_floating_point() or rng.random() < 0.5:
        return tensor
    return tensor.to(rng.choice((torch.float16, torch.bfloat16, torch.float64)))


def compare(call: Call, change: Callable[[Tensor], Tensor]) -> str:
    """Returns 'equal', 'skipped', or how a call differs whose arguments are changed."""
    func, *arguments = call
    args, kwargs = tree_map_only(Tensor, change, tuple(arguments))
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if not all(t.numel() for t in given):
        return "skipped"  # the strides of no elements change no number
    try:
        with torch.no_grad():
            real = func(*args, **kwargs)
    except Exception:  # such as a view of another layout
        return "skipped"
    mode = RealLayouts()
    fake_args, fake_kwargs = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
    try:
        with mode, logging_disabled():
            fake = func(*fake_args, **fake_kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return "skipped"  # such a layer runs in Python
    ours, expected = layouts(fake), layouts(real)
    return "equal" if ours == expected else f"{func} of {layouts(given)}: traced {ours}, real {expected}"


def compare_entry(entry: Any, rng: random.Random, report: Callable[[str], None]) -> None:
    seen = Counter[str]()
    for call in calls_of(entry, samples=10):
        leaves = tree_leaves(call[1:])
        kinds = [(t.dim(), t.dtype) if isinstance(t, Tensor) else type(t) for t in leaves]
        seen[key := f"{call[0]} {kinds}"] += 1
        if seen[key] <= 2:
            report(compare(call, lambda t: t))
            # An argument that is a dtype must agree with those of tensors, and so must the scales of numbers.
            is_fixed = "_scaled_" in key or any(isinstance(leaf, torch.dtype) for leaf in leaves)
            changes = [in_another_layout] * 2 + [in_another_dtype] * (0 if is_fixed else 2)
            for change in changes:
                report(compare(call, functools.partial(change, rng)))


def in_child(function: Callable[[Callable[[str], None]], None]) -> list[str]:
    """Calls a function in a child of a fork, and returns what it reported before it ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(writer, "wb") as stream:
            try:
                function(lambda text: pickle.dump(text, stream))
            except BaseException as error:
                pickle.dump(f"raised {error!r}", stream)
        os._exit(0)
    os.close(writer)
    found: list[str] = []
    with os.fdopen(reader, "rb") as stream:
        while True:
            try:
                found.append(pickle.load(stream))
            except (EOFError, pickle.UnpicklingError):  # it crashed
                break
    os.waitpid(child, 0)
    return found


def database() -> list[Any]:
    # It imports this package, which we do not install, for tests of its own.
    sys.modules.setdefault("expecttest", types.ModuleType("expecttest")).TestCase = unittest.TestCase  # type: ignore[attr-defined]
    from torch.testing._internal.common_methods_invocations import op_db

    return [entry for entry in op_db if entry.dtypes]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", default="0")
    seed = parser.parse_args().seed
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    outcomes = Counter[str]()
    for entry in database():
        name = f"{entry.name}.{entry.variant_test_name}"

        def compare_all(report: Callable[[str], None], entry: Any = entry, name: str = name) -> None:
            compare_entry(entry, random.Random(f"{seed}/{name}"), report)

        outcomes.update(in_child(compare_all))
    for text in sorted(outcomes.keys() - {"equal", "skipped"}):
        print(text)
    print(outcomes["equal"], "equal,", outcomes["skipped"], "skipped")
    return int(outcomes.keys() != {"equal", "skipped"})


if __name__ == "__main__":
    sys.exit(main())

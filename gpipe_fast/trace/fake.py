"""Fake tensors with the strides and dtypes of the real kernels' results."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from gpipe_fast.layers.sharded import is_sharded
from gpipe_fast.strides import bits_of, span, with_bits
from gpipe_fast.torch_private.fake_tensors import FakeTensorMode, ShapeEnv
from gpipe_fast.torch_private.modes import disable_current_modes
from gpipe_fast.torch_private.operators import OpOverload
from gpipe_fast.torch_private.pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

aten = torch.ops.aten

# Operators whose fake kernels return the right layout, and whose real kernels are expensive.
_EXACT_FAKE_KERNELS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})


class RealLayouts(FakeTensorMode):
    """A fake mode that takes strides and dtypes from the real kernel where the fake kernel's may be wrong.

    For permuted and channels_last arguments, some fake kernels (group and batch norm, padding, gated units)
    return other strides than the real kernels: later operators would sum in another order, and an out variant
    that ignores the strides of its memory would permute its result. Such is log_softmax's backward; its fake
    kernel is a decomposition with the fault that pytorch#88761 mended in softmax's. For tensors of several
    dtypes, fake norms return statistics of a narrower dtype than the real ones, and fake losses the widest
    dtype where real ones return that of the input. The fake sum of bfloat16 embeddings (`_embedding_bag`) has
    another shape. A fake view may have another stride
    of a dimension of size one, by which kernels tell channels_last. The real kernel runs once, on zeros,
    during the trace.

    Attributes:
        in_place: the name of the operator for which others run. If it changes a tensor in place, then its
            functional variant returns one with the same strides.
    """

    _runs_kernels = True
    in_place = ""

    def __init__(self, shape_env: ShapeEnv | None = None, runs_kernels: bool = True) -> None:
        # Plain tensor attributes and list indexing bring real tensors into the trace. static_shapes: only the
        # inputs, which override it, have symbols for sizes.
        super().__init__(allow_non_fake_inputs=True, shape_env=shape_env, static_shapes=True)
        self._runs_kernels = runs_kernels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the fake kernel, and replaces results whose strides or dtype differ from the real kernel's."""
        if func is not aten.lift_fresh.default:  # the elements of a tensor made from numbers are known
            args = tuple(map(self._without_elements, args))
        fake = super().__torch_dispatch__(func, types, args, kwargs)
        if fake is NotImplemented:  # for a DTensor, whose own dispatch comes first
            return fake
        if self.in_place == f"{func._schema.name}_" and isinstance(fake, Tensor):
            with self:
                return torch.empty_strided(fake.shape, args[0].stride(), dtype=fake.dtype, device=fake.device)
        if not self._runs_kernels or not _may_differ_from_real(func):
            return fake
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        is_exact = not _mixes_dtypes(tensors) and func is not aten._embedding_bag.default
        if is_exact and all(map(_is_strictly_contiguous, tensors)):
            return fake
        if any(depends_on_data(size) for tensor in tensors for size in tensor.shape):
            return fake
        # A kernel for gradients may read out of bounds where the forward's kernel would have raised. In eval
        # mode, a batch norm saves empty statistics.
        if any(0 in map(hint, t.shape) for t in tensors if not (t.dim() == 1 and _is_batch_norm(func))):
            return fake
        try:
            with disable_current_modes(), torch.no_grad():
                real = func(*real_arguments(args), **real_arguments(kwargs or {}))
        except Exception:  # zeros need not be valid arguments; then the fake results are kept
            return fake
        leaves, structure = tree_flatten(fake)
        replaced = functools.partial(_with_real_layout, func is aten.view.default)
        with self:
            return tree_unflatten(map(replaced, leaves, tree_leaves(real)), structure)

    def _without_elements(self, value: Any) -> Any:
        """Returns a fake tensor for a real one, such as a stand-in for a constant; else the value."""
        is_real = isinstance(value, Tensor) and not (self.is_our_fake(value) or is_sharded(value))
        return self.fake_tensor_converter.from_real_tensor(self, value) if is_real else value


class FakeLayouts(RealLayouts):
    """A fake mode that trusts fake kernels, for functions that are traced once more where they run."""

    _runs_kernels = False


@functools.cache
def _may_differ_from_real(func: Any) -> bool:
    return (
        isinstance(func, OpOverload)
        and func.namespace == "aten"
        and func not in _EXACT_FAKE_KERNELS
        and torch.Tag.nondeterministic_seeded not in func.tags
        and not func._schema.is_mutable
        and (func is aten.view.default or not any(r.alias_info for r in func._schema.returns))
    )


def _mixes_dtypes(tensors: list[Tensor]) -> bool:
    """Returns whether tensors have different floating point dtypes, as an input and a loss's target may."""
    return len({t.dtype for t in tensors if t.is_floating_point()}) > 1


def _is_batch_norm(func: OpOverload[Any, Any]) -> bool:
    return "batch_norm" in func.__name__


def _is_strictly_contiguous(tensor: Tensor) -> bool:
    """Returns whether a tensor is contiguous, including the strides of its dimensions of size one.

    ``is_contiguous`` is true for a channels_last tensor of 1 x 1 images, which the kernels treat differently.
    """
    if any(map(depends_on_data, tensor.shape)):
        return False
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if hint(stride) != expected:
            return False
        expected *= max(hint(size), 1)
    return True


def real_arguments(arguments: Any) -> Any:
    """Returns arguments with zeros in the place of fake tensors, and numbers in that of symbols."""
    return tree_map_only((Tensor, torch.SymInt), _real_zeros, arguments)


def _real_zeros(value: Any) -> Any:
    """Returns real zeros for a tensor, and the hint for a symbol."""
    if not isinstance(value, Tensor):
        return hint(value)
    shape, strides = tuple(map(hint, value.shape)), tuple(map(hint, value.stride()))
    zeros = torch.zeros(span(shape, strides), dtype=value.dtype, device=value.device)
    return with_bits(zeros.as_strided(shape, strides), bits_of(value))


def depends_on_data(size: int | torch.SymInt) -> bool:
    """Returns whether a size follows from elements of a tensor, as the number that a mask selects."""
    return isinstance(size, torch.SymInt) and not size.node.has_hint()


def hint(size: int | torch.SymInt) -> int:
    """Returns a size as the number that it has in the trace, without adding a guard."""
    if not isinstance(size, torch.SymInt):
        return size
    number = size.node.hint
    assert isinstance(number, int)
    return number


def _form(tensor: Tensor) -> tuple[int, ...]:
    return tuple(map(hint, (*tensor.shape, *tensor.stride())))


class LayoutDependsOnSizes(RuntimeError):
    """Raised if real and fake strides differ and sizes are symbols; real strides hold for one size only."""


def _with_real_layout(is_view: bool, fake: Any, real: Any) -> Any:
    both = isinstance(fake, Tensor) and isinstance(real, Tensor)
    if (
        not both
        or any(map(depends_on_data, fake.shape))
        or (_form(fake), fake.dtype) == (_form(real), real.dtype)
    ):
        return fake
    if any(isinstance(size, torch.SymInt) for size in fake.shape):
        raise LayoutDependsOnSizes
    if is_view:
        return fake.as_strided(real.shape, real.stride())
    return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=fake.device)

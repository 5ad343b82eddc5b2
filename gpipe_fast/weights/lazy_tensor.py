"""A tensor of a state dict that PyTorch reads when it copies the tensor into the model.

`nn.Module.load_state_dict` gets lazy tensors in place of tensors. It compares their names and shapes, calls
the hooks of modules, and copies one tensor after the other::

    parameter.copy_(lazy)  ->  LazyTensor.__torch_function__  ->  Targets.copy: allocates, reads, copies
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_fast.layers.sharded import divided_like, is_sharded
from gpipe_fast.torch_private import pytree
from gpipe_fast.torch_private.fake_tensors import make_subclass, swap_tensor_impl
from gpipe_fast.torch_private.modes import DisableTorchFunctionSubclass


class Entry(NamedTuple):
    """A tensor that can be read.

    Attributes:
        like: a meta tensor of its shape and dtype.
        read: reads the tensor into host memory, each time anew.
    """

    like: Tensor
    read: Callable[[], Tensor]


Quantize = Callable[[Callable[[], Tensor], torch.device], None]


class Targets:
    """The tensors of a model that lazy tensors are copied into.

    Attributes:
        devices: the device of its stage for each tensor, by ``id``.
        is_trial: whether copies are only noted.
        copied: the ``id`` of each tensor that was copied into.
        quantizers: for meta tensors that become quantized ones, what reads and replaces them, given a device.
    """

    def __init__(
        self,
        devices: Mapping[int, torch.device],
        is_trial: bool = False,
        quantizers: Mapping[int, Quantize] | None = None,
    ) -> None:
        self.devices = devices
        self.is_trial = is_trial
        self.quantizers = quantizers or {}
        self.copied: set[int] = set()

    def copy(self, target: Tensor, read: Callable[[], Tensor]) -> None:
        """Copies a tensor into another one. A meta tensor gets data, unless the copy fails."""
        if target.is_meta:
            check_has_no_hooks(target)
        if not self.is_trial:
            device = self.devices.get(id(target)) if target.is_meta else None
            if device is None:
                target.copy_(divided_like(target, read()))
            elif id(target) in self.quantizers:
                with making_data():
                    self.quantizers[id(target)](read, device)
            elif device.type != "meta":  # tensors of stages in other processes are not even read
                with making_data():
                    data = torch.empty_like(target, device=device)
                    data.copy_(divided_like(target, read()))
                    replace(target, data)
        self.copied.add(id(target))


@contextlib.contextmanager
def making_data() -> Iterator[None]:
    """Makes data in the block that can be trained later, even under ``torch.inference_mode()``."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def check_has_no_hooks(target: Tensor) -> None:
    """Checks that a meta tensor can be replaced.

    Raises:
        RuntimeError: it has hooks, which would never be called.
    """
    if target._backward_hooks or getattr(target, "_post_accumulate_grad_hooks", None):
        raise RuntimeError(
            "a tensor hook on a meta tensor would be lost when the tensor gets memory; register the hook "
            "after the model is loaded"
        )


def replace(target: Tensor, data: Tensor) -> None:
    """Gives a tensor other data, on another device.

    The object stays the same: tied parameters stay tied, and optimizers keep their parameters. This is the
    last step of `torch.utils.swap_tensors`, which refuses tensors with weak references, as those of recurrent
    layers, or that a graph holds. Here, such references follow the object, and no graph has used the data.
    """
    if is_sharded(target):
        swap_tensor_impl(target, nn.Parameter(data, target.requires_grad))
        target._local_tensor = data._local_tensor  # type: ignore[attr-defined]
        return
    other: Tensor = make_subclass(type(target), data, target.requires_grad)
    swap_tensor_impl(target, other)


# Functions that read no element.
_METADATA = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "is_meta", "ndim", "requires_grad", "layout")
    ),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__),
}


class LazyTensor(Tensor):
    """A meta tensor that is read when it is copied, or when another function needs its elements."""

    read: Callable[[], Tensor]
    targets: Targets

    @classmethod
    def of(cls, entry: Entry, targets: Targets) -> LazyTensor:
        """Returns a lazy tensor for an entry."""
        lazy = entry.like.as_subclass(cls)
        lazy.read, lazy.targets = entry.read, targets
        return lazy

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Reads the tensor, unless `func` needs its metadata only."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in (Tensor.copy_, Tensor.module_load) and type(args[0]) is not cls:
            args[1].targets.copy(args[0], args[1].read)
            return args[0] if func is Tensor.copy_ else args[0].detach()
        lazy = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        args, kwargs = pytree.tree_map_only(cls, lambda leaf: leaf.read(), (args, kwargs))
        targets = lazy[0].targets
        return pytree.tree_map_only(
            Tensor, lambda tensor: cls.of(entry_of(tensor), targets), func(*args, **kwargs)
        )


def entry_of(tensor: Tensor) -> Entry:
    """Returns an entry of a tensor in memory."""
    return Entry(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), lambda: tensor)


def as_meta(tensor: Tensor) -> Tensor:
    """Returns a meta tensor of the shape, strides and dtype of another one."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

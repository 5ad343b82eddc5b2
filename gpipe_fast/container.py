"""A sequence of layers from outside, as it was given: what is there beside training them."""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from gpipe_fast.compat import saved
from gpipe_fast.devices import elsewhere

if TYPE_CHECKING:
    from typing_extensions import Self


class Container(nn.Module):
    """Has the layers of a ``Sequential`` as children of its own, under their names.

    Attributes:
        balance: layers per partition.
        devices: where each partition is.
    """

    balance: list[int]
    devices: list[torch.device]

    def _adopt(self, module: nn.Sequential) -> None:
        """Takes a ``Sequential``'s layers, as they are, to their devices.

        Raises:
            ValueError: one has a name that is taken.
        """
        for name, _ in module.named_children():
            if hasattr(self, name):
                raise ValueError(f"a layer named {name!r} would hide GPipe's own attribute; rename the layer")
        for name, layer in module.named_children():
            self.add_module(name, layer)
        self._place()
        self.training = module.training

    def _place(self) -> None:
        """Moves the layers to the devices of their stages."""
        for partition, device in zip(self.partitions, self.devices, strict=True):
            if any(elsewhere(t.device, device) for t in (*partition.parameters(), *partition.buffers())):
                partition.to(device)

    def __len__(self) -> int:
        """The number of layers."""
        return len(self._modules)

    def __getitem__(self, index: int) -> nn.Module:
        """A layer by position; negative positions count from the end."""
        try:
            position = operator.index(index)
        except TypeError:
            raise TypeError(f"layers are indexed by integers, got {type(index).__name__}") from None
        return list(self)[position]

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers in order."""
        return self.children()

    @property
    def partitions(self) -> nn.ModuleList:
        """The layers of each stage, as a `Sequential` of its own, under their names.

        A view, made when asked for: it holds the layers themselves, but hooks on it and modules put into it
        are nobody's.
        """
        layers, found = iter(self.named_children()), nn.ModuleList()
        for size in self.balance:
            found.append(nn.Sequential(OrderedDict(itertools.islice(layers, size))))
        for container in (found, *found):
            container.training = self.training
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module takes any module as a child, properties or not.
        if name == "partitions":
            raise AttributeError("partitions cannot be set: it is a view of the layers as balance cuts them")
        super().__setattr__(name, value)

    def cuda(self, device: int | torch.device | None = None) -> NoReturn:
        """Raises TypeError: every stage has its device."""
        _deny_moving()

    def cpu(self) -> NoReturn:
        """Raises TypeError: every stage has its device."""
        _deny_moving()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Casts to a dtype or a memory format.

        Raises:
            TypeError: a device is asked for, or a tensor's; every stage has its own.
        """
        if kwargs.keys() & {"device", "tensor"}:
            _deny_moving()
        if args and isinstance(args[0], (torch.device, int, str, Tensor)):
            _deny_moving()
        return super().to(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """What PyTorch calls before it comes to the layers, with a dictionary that is no user's."""
        saved.rename(state_dict, prefix, self)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _deny_moving() -> NoReturn:
    raise TypeError(
        "denied to move parameters and buffers, because GPipe should manage device placement; "
        "pass devices=[...] when making it"
    )

"""A sequence of layers from outside, as it was given: what is there beside training them."""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from gpipe_fast.compat import saved
from gpipe_fast.devices import Device, elsewhere
from gpipe_fast.layers.structure import LayerSequence
from gpipe_fast.unsupported import refuse_script

if TYPE_CHECKING:
    from typing_extensions import Self


class Container(LayerSequence):
    """Has the layers of a ``Sequential`` as children of its own, under their names."""

    _balance: list[int]
    _devices: list[torch.device]
    _given_devices: list[torch.device] | None

    def _arrange(self, balance: Iterable[int], devices: Iterable[Device] | None) -> None:
        raise NotImplementedError

    @property
    def balance(self) -> list[int]:
        """Layers per partition. Assigning cuts the layers anew and moves them to their devices.

        The next call makes new programs. What the optimizer keeps stays where it is: make it after the cut
        where layers move between devices. The list is a copy; changing it changes nothing.

        Raises:
            ValueError: when set to what does not fit the layers, and stays as it was.
            IndexError: when set to more partitions than there are devices.
        """
        return list(self._balance)

    @balance.setter
    def balance(self, balance: Iterable[int]) -> None:
        self._arrange(balance, self._given_devices)

    @property
    def devices(self) -> list[torch.device]:
        """The device of each partition. Assigning moves the layers, as for `balance`.

        Raises:
            ValueError: when set to devices on which stages cannot be, and stays as it was.
            IndexError: when set to fewer devices than there are partitions.
        """
        return list(self._devices)

    @devices.setter
    def devices(self, devices: Iterable[Device] | None) -> None:
        self._arrange(self._balance, devices)

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
        for partition, device in zip(self.partitions, self._devices, strict=True):
            if any(elsewhere(t.device, device) for t in (*partition.parameters(), *partition.buffers())):
                partition.to(device)

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

    def __setitem__(self, index: object, layer: object) -> NoReturn:
        """Raises TypeError: the layers are those of the ``Sequential`` that was given."""
        _deny_changing("; to replace one, assign it under its name: setattr(model, '0', layer)")

    def __delitem__(self, index: object) -> NoReturn:
        """Raises TypeError, as assigning a layer does."""
        _deny_changing()

    def append(self, module: object) -> NoReturn:
        """Raises TypeError, as assigning a layer does."""
        _deny_changing()

    def extend(self, sequential: object) -> NoReturn:
        """Raises TypeError, as assigning a layer does."""
        _deny_changing()

    def insert(self, index: object, module: object) -> NoReturn:
        """Raises TypeError, as assigning a layer does."""
        _deny_changing()

    def pop(self, key: object = -1) -> NoReturn:
        """Raises TypeError, as assigning a layer does."""
        _deny_changing()

    @property
    def partitions(self) -> nn.ModuleList:
        """The layers of each stage, as a `Sequential` of its own, under their names.

        A view, made when asked for: it holds the layers themselves, but hooks on it and modules put into it
        are nobody's.
        """
        layers, found = iter(self.named_children()), nn.ModuleList()
        for size in self._balance:
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

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by ``torch.jit.script``, and refuses it."""
        refuse_script()

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


def _deny_changing(hint: str = "") -> NoReturn:
    raise TypeError(
        "the layers of a GPipe cannot be assigned, added or removed by position; make a new one of the "
        f"layers that you want, GPipe(nn.Sequential(*layers), balance=[...]){hint}"
    )

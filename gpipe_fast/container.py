"""The `Sequential` interface of a pipeline: layers, partitions and state dict, without calls."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

import torch
from torch import nn

from gpipe_fast.compat import torchgpipe_state_dict
from gpipe_fast.devices import casts_of
from gpipe_fast.layers.structure import LayerSequence
from gpipe_fast.runtime.runner import Runner
from gpipe_fast.unsupported import refuse
from gpipe_fast.weights.load import (
    Initialize,
    has_meta_tensors,
    load_weights,
    make_lazy,
)
from gpipe_fast.weights.source import Source

if TYPE_CHECKING:
    from typing_extensions import Self


class Placed(nn.Module):
    """A module with tensors on the devices of stages, of which some may be in other processes."""

    _move_by: ClassVar[str]  # what users do instead of moving the module

    def _runners(self) -> Sequence[Runner]:
        """Returns the runners of the layers; the last one has the present placement."""
        raise NotImplementedError

    def _move_assigned(self) -> None:
        """Moves what was assigned to the devices of the stages, and gives memory to meta tensors."""
        for runner in self._runners():
            runner.move_layers()

    def _own_devices(self) -> set[torch.device]:
        """Returns the devices of the stages of this process."""
        return {device for _, device in self._runners()[-1].placed() if device.type != "meta"}

    def _state_elsewhere(self) -> dict[str, Any]:
        """Returns what a state dict has of stages in other processes alone."""
        runners = [runner for runner in self._runners() if runner.processes.is_mesh]
        if not runners:
            return {}
        own = {id(tensor) for runner in runners for tensor in runner.own_tensors()}
        parts = [part for runner in runners for part, _ in runner.placed()]
        elsewhere = {id(x) for part in parts for x in (*part.parameters(), *part.buffers())} - own
        state = super().state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if id(value) in elsewhere}

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Raises TypeError, unless all stages are on that GPU; they stay on the devices of the pipeline."""
        return self.to("cuda" if device is None else device)

    def cpu(self) -> Self:
        """Raises TypeError, unless all stages are on the CPU; they stay on the devices of the pipeline."""
        return self.to("cpu")

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Casts parameters and buffers to a dtype or a memory format.

        Raises:
            TypeError: a device, or a tensor that implies one, was passed, and a stage has another device.
        """
        return super().to(**casts_of(args, kwargs, self._own_devices(), self._move_by))

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """Returns a state dict as PyTorch does. With a mesh, it has no tensors of other processes."""
        found = super().state_dict(*args, prefix=prefix, **kwargs)
        for name in self._state_elsewhere():
            found.pop(prefix + name, None)
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a state dict as PyTorch does, and gives memory to tensors on the meta device.

        With ``assign=True``, the assigned tensors are moved to the devices of their stages. With a mesh, the
        state dict need not have the tensors of other processes, which are not loaded.
        """
        found = super().load_state_dict(state_dict, strict, assign)
        self._move_assigned()
        return found

    def _load_from_state_dict(
        self,
        state_dict: MutableMapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Completes a copy of the user's dict, before PyTorch visits the modules inside."""
        runners = self._runners()
        if runners and has_meta_tensors(self) and not local_metadata.get("assign_to_params_buffers"):
            make_lazy(state_dict, prefix, runners[-1].placed())
        for name, value in self._state_elsewhere().items():
            state_dict.setdefault(prefix + name, value)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)


class Container(Placed, LayerSequence):
    """A module whose direct children are the layers of a ``Sequential``, under the same names."""

    _runner: Runner
    _move_by = "GPipe should manage device placement; pass devices=[...] to GPipe, or set model.devices"

    def _register_layers(self, module: nn.Sequential) -> None:
        """Registers the layers of a ``Sequential`` as children, uncopied.

        Raises:
            ValueError: the name of a layer is an attribute of this class.
        """
        for name, _ in module.named_children():
            if name == "_runner" or hasattr(type(self), name) or hasattr(self, name):
                raise ValueError(f"a layer named {name!r} would hide GPipe's own attribute; rename the layer")
        for name, layer in module.named_children():
            self.add_module(name, layer)
        self.training = module.training

    def _children(self) -> dict[str, nn.Module]:
        """Returns the dictionary of the layers, which changes when a layer is replaced."""
        return cast(dict[str, nn.Module], self._modules)

    def _runners(self) -> Sequence[Runner]:
        return (self._runner,)

    def __getitem__(self, index: int) -> nn.Module:
        """Returns a layer by position. Negative positions count from the end."""
        try:
            position = operator.index(index)
        except TypeError:
            raise TypeError(
                f"layers are indexed by integers, got {type(index).__name__}; for several layers, write "
                "nn.Sequential(*list(model)[0:2])"
            ) from None
        return list(self)[position]

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterates over the layers in order."""
        return self.children()

    def __setitem__(self, index: object, layer: object) -> NoReturn:
        """Raises TypeError: layers cannot be replaced by position."""
        _deny_changing("; to replace one, assign it under its name: setattr(model, '0', layer)")

    def __delitem__(self, index: object) -> NoReturn:
        """Raises TypeError: layers cannot be removed."""
        _deny_changing()

    def append(self, module: object) -> NoReturn:
        """Raises TypeError: layers cannot be added."""
        _deny_changing()

    def extend(self, sequential: object) -> NoReturn:
        """Raises TypeError: layers cannot be added."""
        _deny_changing()

    def insert(self, index: object, module: object) -> NoReturn:
        """Raises TypeError: layers cannot be added."""
        _deny_changing()

    def pop(self, key: object = -1) -> NoReturn:
        """Raises TypeError: layers cannot be removed."""
        _deny_changing()

    @property
    def partitions(self) -> nn.ModuleList:
        """The layers of each stage as a `Sequential`, under their names.

        Each access creates a new view, which contains the layers themselves. Hooks that are registered on the
        view, and modules that are added to it, have no effect on the pipeline.
        """
        found = nn.ModuleList(self._runner.partitions())
        for container in (found, *found):
            container.training = self.training
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module would register a module as a child even where the name is a property.
        if name == "partitions":
            raise AttributeError("partitions cannot be set: it is a view of the layers; set balance instead")
        if name == "memory":
            raise AttributeError(f"memory is a method, got {value!r}; set memory_limit instead")
        super().__setattr__(name, value)

    def __prepare_scriptable__(self) -> NoReturn:
        """Raises RuntimeError. ``torch.jit.script`` calls this method."""
        refuse("torch.jit.script")

    def load_weights(self, source: Source, *, strict: bool = True, init: Initialize | None = None) -> Any:
        """Loads a state dict or a file, stage by stage. Layers on the meta device get memory first.

        Layers that are built under ``torch.device('meta')`` take no memory. Each of their tensors gets memory
        on the device of its stage, and is read and copied before the next one. So the host's memory contains
        one tensor of the file at a time, besides the stages on the CPU::

            with torch.device("meta"):
                layers = nn.Sequential(a(), b(), c(), d())
            model = GPipe(layers, balance=[2, 2], chunks=8)
            model.load_weights("model.safetensors")

        Names, shapes, dtypes and the hooks of modules are treated as by ``load_state_dict``, but no tensor is
        loaded if names or shapes differ. Of tied parameters, the source may name only one. Parameters stay
        the same objects, so that an optimizer may be created before; but meta parameters with tensor hooks
        are refused. If a tensor cannot be read, it stays as it was, and the method can be called again.
        Layers that have data already can be loaded, too.

        Args:
            source: A mapping of names to tensors, such as ``torch.load(path, mmap=True)``; or the path of a
                file. Each tensor of a mapping is taken twice, to check and to load it. A file of the format
                ``.safetensors`` is read without the package of that name; ``.index.json`` is the index of a
                sharded checkpoint, as Hugging Face writes it; any other file is one that ``torch.save`` has
                written, since PyTorch 1.6: it is mapped into memory, and loaded with ``weights_only=True``.
            strict: Whether the names in the source must be exactly those of ``state_dict()``.
            init: A function that initialises a module. It is called with each module that has meta tensors
                which the source lacks: non-persistent buffers and, if ``strict`` is False, parameters. They
                have memory by then. Other tensors of the module are loaded afterwards. A tensor
                counts as unset if it contains NaN after the call, or, if its dtype has no NaN, if nothing was
                written to it. If ``init`` fails, these tensors are on the meta device again. It is also
                called with modules that have meta tensors as plain attributes, which it may set.
                ``load_weights({}, strict=False, init=function)`` initialises a whole model.

        Returns:
            A named tuple of ``missing_keys`` and ``unexpected_keys``, as ``load_state_dict`` does.

        Raises:
            TypeError: ``source`` is neither a mapping nor a path, its file contains no mapping, a name is no
                string, or ``init`` is no function.
            ValueError: A file is incomplete or has another format, the path is that of a folder, or a tensor
                of the source is on the meta device.
            RuntimeError: Names or shapes differ; the source lacks meta tensors, and there is no ``init``, or
                it leaves them unset; a meta tensor has hooks; or a tensor cannot be read. The message names
                the tensors.
        """
        found = load_weights(self, source, self._runner.placed, strict, init)
        self._runner.move_layers()
        return found

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Converts torchgpipe's keys, in a copy of the user's dict."""
        torchgpipe_state_dict.rename_keys(state_dict, prefix, self)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def runner_of(model: Container) -> Runner:
    """Returns the runner of a pipeline."""
    return model._runner


def _deny_changing(hint: str = "") -> NoReturn:
    raise TypeError(
        "the layers of a GPipe cannot be assigned, added or removed by position; create a new GPipe from the "
        f"layers that you want, GPipe(nn.Sequential(*layers), balance=[...]){hint}"
    )

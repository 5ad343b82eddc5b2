"""A layer that makes the calls of a `Part`: Python code is written for it, as the user would write it.

Layers with equal code share a class, so that equal blocks are traced once::

    class LlamaDecoderLayer(GlueLayer):
        def forward(self, values):
            v0, v1, v2, v3 = values
            v4 = self.m0(v3, attention_mask=None, position_embeddings=(v1, v2), use_cache=False)
            return (v0, v1, v2, v4)
"""

from __future__ import annotations

import linecache
import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gpipe_fast.from_model.cut import Part, size_source, sizes_in
from gpipe_fast.from_model.dataflow import (
    Call,
    CannotCut,
    Dataflow,
    Device,
    Nested,
    Owned,
    Ref,
    Size,
    Surroundings,
)
from gpipe_fast.runtime.cache import Cache


class GlueLayer(nn.Module):
    """A layer that holds modules and tensors of the user's model, and calls functions on them.

    Attributes:
        source: the code of its forward.
    """

    source: ClassVar[str]

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def check_sizes(x: Tensor, expected: tuple[int, ...]) -> None:
    """Checks the shape of a module's result, which a capture has found for a few sizes only.

    Raises:
        RuntimeError: it is another one.
    """
    if x.shape != expected:
        raise RuntimeError(
            f"a module that decides by elements returned a tensor of shape {tuple(x.shape)}; from calls with "
            f"other sizes, {expected} was expected; pad the inputs to equal lengths"
        )


class OwnedTensors:
    """The tensors of the user's modules that a layer uses itself, such as a class token.

    Args:
        layer: the layer.
        owned: whose tensors they are, by the layer's name for them.
        read: returns the present tensor.
    """

    def __init__(
        self, layer: GlueLayer, owned: dict[str, Owned], read: Callable[[Owned], Tensor] = Owned.read
    ) -> None:
        self._layer, self._owned, self._read = layer, owned, read
        self.take()

    def take(self) -> None:
        """Gives the layer the tensors that the user's modules have now."""
        for name, owned in self._owned.items():
            tensor = self._read(owned)
            if getattr(self._layer, name, None) is tensor:
                continue
            if isinstance(tensor, nn.Parameter):
                self._layer.register_parameter(name, tensor)
            elif owned.name in owned.owner._buffers:
                self._layer.register_buffer(name, tensor)
            else:
                setattr(self._layer, name, tensor)

    def give_back(self) -> None:
        """Gives the user's modules the tensors that the layer has now, which may be on another device."""
        for name, owned in self._owned.items():
            for table in (owned.owner._parameters, owned.owner._buffers):
                if owned.name in table:
                    table[owned.name] = getattr(self._layer, name)


def make_layer(
    flow: Dataflow,
    part: Part,
    batch_dims: Mapping[int, int | None] | None = None,
    given_dims: Mapping[int, int] | None = None,
    read: Callable[[Owned], Tensor] = Owned.read,
) -> tuple[GlueLayer, OwnedTensors]:
    """Returns the layer of a part, and the tensors that it uses itself.

    Args:
        flow: the record.
        part: the part.
        batch_dims: for the last layer, the batch dimension of each value that it returns, which becomes the
            first one; None for a value without one, which gets one of size 1.
        given_dims: for the first layer, the batch dimensions of inputs, which are given as the first ones.
        read: returns the present tensor of a module.
    """
    writer = _Writer(flow, part, batch_dims or {}, given_dims or {})
    source = writer.write()
    name = "Glue" if part.block is None else type(part.block).__name__
    made = _class_of(name, source, writer.constants)
    layer = made(writer.modules)
    return layer, OwnedTensors(layer, writer.owned, read)


_classes: Cache[Any, type[GlueLayer]] = Cache(512)


def _class_of(name: str, source: str, constants: dict[str, Any]) -> type[GlueLayer]:
    # Classes keep their constants alive, so no other object has the same address.
    key = name, source, tuple((key, id(value)) for key, value in constants.items())
    if key not in _classes:
        file = f"<gpipe_fast layer {len(linecache.cache)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        scope = {"torch": torch, "operator": operator, "math": math, **constants}
        exec(compile(source, file, "exec"), scope)
        _classes[key] = type(
            name, (GlueLayer,), {"forward": scope["forward"], "__module__": __name__, "source": source}
        )
    return _classes[key]


class _Writer:
    """Writes a layer's code.

    Attributes:
        modules: the modules that the code calls, by name.
        owned: the tensors that it reads, by name.
        constants: other objects that it reads, by name.
    """

    def __init__(
        self,
        flow: Dataflow,
        part: Part,
        batch_dims: Mapping[int, int | None],
        given_dims: Mapping[int, int],
    ) -> None:
        self._flow, self._part, self._batch_dims = flow, part, batch_dims
        self._given_dims = given_dims
        self._names: dict[int, str] = {}
        self._sizes: dict[int, str] = {}
        self.modules: dict[str, nn.Module] = {}
        self.owned: dict[str, Owned] = {}
        self.constants: dict[str, Any] = {}

    def write(self) -> str:
        """Returns the code of forward."""
        part = self._part
        given = [self._new_name(ref) for ref in part.given]
        lines = [f"{', '.join(given)}, = values"] if given else []
        moved = [(self._names[ref], dim) for ref, dim in self._given_dims.items() if dim]
        lines += [f"{name} = {name}.movedim(0, {dim})" for name, dim in moved]
        if any(self._uses_device(call) for call in part.calls):
            lines.append(f"device = {given[0]}.device")
        for size in sizes_in(self._flow, part.calls):
            source = size_source(self._flow, size, part.given)
            assert source is not None
            self._sizes[size] = f"n{size}"
            lines.append(f"n{size} = {self._names[source[0]]}.shape[{source[1]}]")
        for call in part.calls:
            lines += self._call(call)
        lines.append(f"return ({''.join(f'{self._returned(ref)}, ' for ref in part.returned)})")
        return "def forward(self, values):\n" + "".join(f"    {line}\n" for line in lines)

    def _returned(self, ref: int) -> str:
        dim = self._batch_dims.get(ref, 0)
        if dim is None:
            return f"{self._names[ref]}.unsqueeze(0)"
        return f"{self._names[ref]}.movedim({dim}, 0)" if dim else self._names[ref]

    def _new_name(self, ref: int) -> str:
        return self._names.setdefault(ref, f"v{len(self._names)}")

    def _uses_device(self, call: Call) -> bool:
        return call.surroundings != self._flow.surroundings or any(
            isinstance(leaf, Device) for leaf in call.arguments.leaves
        )

    def _call(self, call: Call) -> list[str]:
        expression = self._expression(call)
        skeleton = Nested(tuple(range(len(call.result.leaves))), call.result.spec).build(lambda index: index)
        new = {
            ref.index: position
            for position, ref in reversed(list(enumerate(call.result.leaves)))
            if isinstance(ref, Ref) and ref.index not in self._names
        }
        positions = {position: ref for ref, position in new.items()}
        if skeleton == 0 and type(skeleton) is int:
            lines = [f"{self._new_name(positions[0])} = {expression}" if positions else expression]
        elif not positions:
            lines = [expression]
        else:
            lines = [f"r = {expression}"]
            lines += [
                f"{self._new_name(positions[position])} = {path}"
                for position, path in _paths(skeleton, "r")
                if position in positions
            ]
        if call.sizes_are_likely:
            lines += map(self._check, dict.fromkeys(call.result.refs()))
        return self._surround(lines, call.surroundings)

    def _check(self, ref: int) -> str:
        sizes = "".join(f"{self._leaf(size)}, " for size in self._flow.values[ref].shape)
        return f"{self._constant(check_sizes)}({self._names[ref]}, ({sizes}))"

    def _surround(self, lines: list[str], inner: Surroundings) -> list[str]:
        outer = self._flow.surroundings
        if inner.autocast != outer.autocast:
            dtype = "None" if inner.autocast is None else self._constant(inner.autocast)
            enabled = inner.autocast is not None
            lines = _block(f"with torch.autocast(device.type, dtype={dtype}, enabled={enabled}):", lines)
        if inner.grad != outer.grad:
            lines = _block(f"with torch.{'enable' if inner.grad else 'no'}_grad():", lines)
        return lines

    def _expression(self, call: Call) -> str:
        args, kwargs = call.arguments.build(lambda leaf: _Code(self._leaf(leaf)))
        each = {name: self._nested(value) for name, value in [*enumerate(args), *kwargs.items()]}
        for index, (name, kind) in enumerate(call.tables):
            each[name] = f"(t{index} := {self._constant(kind)}({each[name]}))"
        codes, named = [each[i] for i in range(len(args))], [f"{name}={each[name]}" for name in kwargs]
        if call.is_module:
            expression = f"self.{_name_in(self.modules, 'm', call.target)}({', '.join([*codes, *named])})"
            tables = ", ".join(f"{table!r}: t{index}" for index, (table, _) in enumerate(call.tables))
            return f"({expression}, {{{tables}}})" if tables else expression
        if isinstance(call.target, str):
            return f"{codes[0]}.{call.target}({', '.join([*codes[1:], *named])})"
        return f"{self._function(call.target)}({', '.join([*codes, *named])})"

    def _function(self, function: Any) -> str:
        name = getattr(function, "__name__", "")
        if getattr(operator, name, None) is function:
            return f"operator.{name}"
        return self._constant(function)

    def _constant(self, value: Any) -> str:
        return _name_in(self.constants, "c", value)

    def _leaf(self, leaf: Any) -> str:
        if isinstance(leaf, Ref):
            return self._names[leaf.index]
        if isinstance(leaf, Owned):
            return f"self.{_name_in(self.owned, 'p', leaf)}"
        if isinstance(leaf, Device):
            return "device"
        if isinstance(leaf, Size):
            return f"({leaf.code(self._sizes)})"
        if leaf is None or leaf is Ellipsis or type(leaf) in (bool, int, str, bytes):
            return repr(leaf)
        if type(leaf) is float:
            return repr(leaf) if math.isfinite(leaf) else f"float('{leaf}')"
        return self._constant(leaf)

    def _nested(self, value: Any) -> str:
        if isinstance(value, _Code):
            return value.text
        if isinstance(value, slice):
            return f"slice({value.start.text}, {value.stop.text}, {value.step.text})"
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{self._constant(type(value))}({', '.join(map(self._nested, value))})"
        if type(value) in (tuple, list, torch.Size):
            inner = "".join(f"{self._nested(each)}, " for each in value)
            return f"[{inner}]" if type(value) is list else f"({inner})"
        if type(value) in (dict, OrderedDict):
            inner = ", ".join(f"{key!r}: {self._nested(each)}" for key, each in value.items())
            return f"{{{inner}}}" if type(value) is dict else f"{self._constant(OrderedDict)}({{{inner}}})"
        if isinstance(value, dict):  # as a ModelOutput
            inner = ", ".join(f"{key}={self._nested(each)}" for key, each in value.items())
            return f"{self._constant(type(value))}({inner})"
        raise CannotCut(f"a {type(value).__name__} is passed between modules")


class _Code:
    def __init__(self, text: str) -> None:
        self.text = text


def _name_in(table: dict[str, Any], prefix: str, value: Any) -> str:
    """Returns the name of a value in a table, and adds it if it is new. Modules are never equal to others."""
    by_value = not isinstance(value, nn.Module)
    for name, known in table.items():
        if known is value or (by_value and type(known) is type(value) and known == value):
            return name
    name = f"{prefix}{len(table)}"
    table[name] = value
    return name


def _block(head: str, lines: Sequence[str]) -> list[str]:
    return [head, *(f"    {line}" for line in lines)]


def _paths(skeleton: Any, expression: str) -> Iterator[tuple[int, str]]:
    """Returns the leaves of a nested value of integers, with the expressions that read them."""
    if isinstance(skeleton, dict):
        for key, value in skeleton.items():
            yield from _paths(value, f"{expression}[{key!r}]")
    elif isinstance(skeleton, (tuple, list)):
        for index, value in enumerate(skeleton):
            yield from _paths(value, f"{expression}[{index}]")
    elif type(skeleton) is int:
        yield skeleton, expression
    else:
        raise CannotCut(f"a {type(skeleton).__name__} is returned by a module between blocks")

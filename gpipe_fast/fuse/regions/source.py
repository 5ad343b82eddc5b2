"""The source of a region's kernel.

Every value is computed in fp32 and rounded to the dtype that PyTorch's operator returns. So it differs from
PyTorch's only where sums are added in another order, and where an exponential or a root is approximated. The
source has one statement per value, with the operator's name where a new operator begins::

    # native_layer_norm
    v3 = tl.sum(tl.where(m_col, v0, 0.0), axis=1, keep_dims=True)
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gpipe_fast.fuse.regions.layout import Layout, Strides, contiguous_strides
from gpipe_fast.fuse.regions.loops import Access, Region
from gpipe_fast.fuse.regions.operators import FLOATS, literal
from gpipe_fast.fuse.regions.values import Constant, Mapped, Reduced, Value, root_of
from gpipe_fast.kernels.launch import cdiv
from gpipe_fast.lower.work import operator_name

_IMPORTS = """\
import triton
import triton.language as tl

from gpipe_fast.kernels.activations import activate, activation_derivative, hyperbolic_tangent
"""
_TYPES = {torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16"}
# What a reduction of no elements gives.
_NEUTRAL = {"sum": "0.0", "max": 'float("-inf")'}
_PLAIN = frozenset({"_to_copy", "clone", "full", "full_like", "zeros", "zeros_like", "sum", "mul", "add"})
_MAX_NAMES = 3


@dataclass(frozen=True)
class Block:
    """What one program computes at once.

    Attributes:
        rows: rows of a block.
        cols: columns of a block.
        loops: whether a program goes through several blocks of rows.
        one_program: whether one program has all rows.
    """

    rows: int
    cols: int
    loops: bool
    one_program: bool


@dataclass(frozen=True)
class Source:
    """A kernel's source.

    Attributes:
        name: the kernel's name: names of its operators, and a hash of the source.
        text: the source.
    """

    name: str
    text: str


def source_of(region: Region, block: Block) -> Source:
    """Returns the source of the kernel that computes a region.

    The kernel's arguments are the inputs, the outputs, the number of rows, and the rows of one program if it
    loops.
    """
    return _Writer(region, block).source()


class _Writer:
    def __init__(self, region: Region, block: Block) -> None:
        self._region, self._block, loops = region, block, region.loops
        self._loops = loops
        self._strides: dict[Value, Strides] = {
            access.value: self._strides_of(access) for access in (*region.inputs, *region.outputs)
        }
        given = list(self._strides.values())
        self._rows = Layout.of("row", loops.rows, loops.sizes, given, is_int64=True)
        self._cols = Layout.of("col", loops.cols, loops.sizes, given)
        self._names: dict[Value, str] = {}
        # Statements before the loop over rows, and in it.
        self._before: list[str] = []
        self._inside: list[str] = []
        self._after: list[str] = []
        self._masks_rows = block.rows > 1
        self._masks_cols = loops.is_flat or loops.num_cols % block.cols != 0

    def _strides_of(self, access: Access) -> Strides:
        if root_of(access.value) in self._loops.column_sums:
            return contiguous_strides(self._loops.shaped[access.value], self._loops.sizes)
        return self._loops.strides_of(access.value, access.tensor)

    def source(self) -> Source:
        for i, access in enumerate(self._region.inputs):
            self._load(i, access)
        for unit in self._region.units:
            commented: list[bool] = []
            for inside, statement in self._unit_statements(unit.values):
                own = self._inside if inside else self._before
                if inside not in commented:
                    own.append(f"# {operator_name(unit.node)}")
                    commented.append(inside)
                own.append(statement)
        for i, access in enumerate(self._region.outputs):
            self._store(i, access)
        body = "\n".join(self._body())
        digest = hashlib.sha256(f"{self._header('')}{body}".encode()).hexdigest()[:8]
        name = "_".join([*self._name_parts(), digest])
        return Source(name, f"{_IMPORTS}\n\n{self._header(name)}\n{body}\n")

    def _name_parts(self) -> list[str]:
        operators = [n.strip("_") for n in self._region.operators if n not in _PLAIN]
        chosen = list(dict.fromkeys(operators or self._region.operators))[:_MAX_NAMES]
        return [re.sub(r"\W", "_", name.removeprefix("native_").strip("_")) for name in chosen]

    def _header(self, name: str) -> str:
        # A number of columns that 16 divides makes masked accesses wide, so kernels are compiled for it.
        sizes = ["num_cols"] if self._loops.is_flat else []
        numbers = [] if sizes else ["num_rows", *["rows_of_program"] * self._block.loops]
        tensors = [f"p_in{i}" for i in range(len(self._region.inputs))]
        tensors += [f"p_out{i}" for i in range(len(self._region.outputs))]
        quoted = ", ".join(f'"{n}"' for n in numbers)
        constants = ["ROWS: tl.constexpr", "COLS: tl.constexpr"]
        options = f"(do_not_specialize=[{quoted}])" if quoted else ""
        return f"@triton.jit{options}\ndef {name}({', '.join([*tensors, *sizes, *numbers, *constants])}):"

    def _body(self) -> Iterator[str]:
        yield from self._column_index()
        yield from _indented(self._before, 1)
        if self._loops.is_flat:
            return
        if not self._block.loops:
            yield "    rows = program * ROWS + tl.arange(0, ROWS)"
            yield from self._row_index("num_rows", 1)
            yield from _indented(self._inside, 1)
            return
        yield "    begin = program * rows_of_program"
        yield "    end = tl.minimum(begin + rows_of_program, num_rows)"
        yield "    for first_row in range(begin, end, ROWS):"
        yield "        rows = first_row + tl.arange(0, ROWS)"
        yield from self._row_index("end", 2)
        yield from _indented(self._inside, 2)
        yield from _indented(self._after, 1)

    def _column_index(self) -> Iterator[str]:
        blocks = cdiv(self._loops.num_cols, self._block.cols)
        if self._loops.is_flat:
            yield "    first_col = tl.program_id(0) * COLS"
        elif blocks == 1:
            yield "    program = tl.program_id(0)"
            yield "    first_col = 0"
        else:
            yield f"    program = tl.program_id(0) // {blocks}"
            yield f"    first_col = tl.program_id(0) % {blocks} * COLS"
        yield "    col = first_col + tl.arange(0, COLS)[None, :]"
        if self._masks_cols:
            yield f"    m_col = col < {'num_cols' if self._loops.is_flat else self._loops.num_cols}"

    def _row_index(self, end: str, depth: int) -> Iterator[str]:
        yield "    " * depth + "row = rows.to(tl.int64)[:, None]"
        if self._masks_rows:
            yield "    " * depth + f"m_row = row < {end}"

    def _address(self, pointer: str, strides: Strides) -> str:
        parts = [pointer, self._rows.offset(strides), self._cols.offset(strides)]
        return " + ".join(p for p in parts if p)

    def _mask(self, rows: bool, cols: bool, *others: str) -> str:
        parts = ["m_row"] * (rows and self._masks_rows) + ["m_col"] * (cols and self._masks_cols)
        return " & ".join([*parts, *others])

    def _varies(self, value: Value) -> tuple[bool, bool]:
        """Returns whether a value varies over rows, and over columns."""
        own = self._loops.varies[value]
        return not own.isdisjoint(self._loops.rows), not own.isdisjoint(self._loops.cols)

    def _load(self, index: int, access: Access) -> None:
        root = root_of(access.value)
        strides = self._strides[access.value]
        rows, cols = self._varies(root)
        mask = self._mask(rows, cols)
        address = self._address(f"p_in{index}", strides)
        text = f"tl.load({address}, mask={mask})" if mask else f"tl.load({address})"
        if root.dtype in _TYPES:
            text += ".to(tl.float32)"
        self._names[root] = name = f"x{index}"
        (self._inside if rows else self._before).append(f"{name} = {text}")

    def _unit_statements(self, values: Sequence[Value]) -> Iterator[tuple[bool, str]]:
        """Yields statements, each with whether it belongs into the loop over rows."""
        for value in values:
            if isinstance(value, Constant) or self._loops.column_sums.get(value, value) is not value:
                continue
            if value in self._loops.column_sums:
                assert isinstance(value, Reduced)
                name = self._names[value] = f"sum{len(self._names)}"
                self._before.append(f"{name} = tl.zeros([ROWS, COLS], tl.float32)")
                operand = self._operand(value.operand)
                masked = f"tl.where(m_row, {operand}, 0.0)" if self._masks_rows else operand
                yield True, f"{name} += {masked}"
                continue
            name = f"v{len(self._names)}"
            text = self._expression(value)
            self._names[value] = name
            yield self._varies(value)[0], f"{name} = {text}"

    def _expression(self, value: Value) -> str:
        if isinstance(value, Reduced):
            found = self._reduction(value)
        else:
            assert isinstance(value, Mapped)
            found = value.template.format(*map(self._operand, value.operands))
        return _rounded(found, value.dtype)

    def _operand(self, value: Value) -> str:
        """Returns a value as an expression in fp32."""
        root = root_of(value)
        if isinstance(root, Constant):
            return literal(root.number)
        return self._names[root] if root.dtype in FLOATS else f"{self._names[root]}.to(tl.float32)"

    def _reduction(self, value: Reduced) -> str:
        operand = self._operand(value.operand)
        axes = self._loops.shaped[value.operand]
        if not set(axes) - set(self._loops.shaped[value]):
            return operand  # over dimensions of one element
        if self._masks_cols:
            operand = f"tl.where(m_col, {operand}, {_NEUTRAL[value.operation]})"
        elif not self._varies(root_of(value.operand))[1]:
            operand = f"{operand} + tl.zeros([1, COLS], tl.float32)"
        return f"tl.{value.operation}({operand}, axis=1, keep_dims=True)"

    def _store(self, index: int, access: Access) -> None:
        value, root = access.value, root_of(access.value)
        loops, pointer = self._loops, f"p_out{index}"
        strides = self._strides[value]
        if root in loops.column_sums:
            address = self._address(pointer, strides)
            if not self._block.one_program:
                count = math.prod(loops.sizes[a] for a in loops.shaped[value])
                address = address.replace(pointer, f"{pointer} + program.to(tl.int64) * {count}")
            total = f"tl.sum({self._names[loops.column_sums[root]]}, axis=0, keep_dims=True)"
            if self._block.one_program:
                total = f"{_rounded(total, root.dtype)}{_cast(root.dtype)}"
            mask = self._mask(False, True)
            if not self._cols.offset(strides):  # all columns have the same sum
                address, mask = f"{address} + col * 0", "col == 0"
            own = self._after if self._block.loops else self._inside
            own.append(_store(address, total, mask))
            return
        axes = frozenset(loops.shaped[value])
        rows, cols = not axes.isdisjoint(loops.rows), not axes.isdisjoint(loops.cols)
        others = []
        if not cols and loops.num_cols > self._block.cols:
            others.append("(first_col == 0)")
        if not rows and loops.rows:
            others.append("(program == 0)")
        name, address = self._names[root], self._address(pointer, strides)
        text = _store(
            address if " " in address else f"{address} + tl.zeros([1, 1], tl.int32)",
            f"{name}{_cast(value.dtype)}",
            self._mask(rows, cols, *others),
        )
        (self._inside if rows or self._varies(root)[0] else self._before).append(text)


def _store(address: str, value: str, mask: str) -> str:
    return f"tl.store({address}, {value}, mask={mask})" if mask else f"tl.store({address}, {value})"


def _cast(dtype: torch.dtype) -> str:
    return f".to({_TYPES[dtype]})" if dtype in _TYPES else ""


def _rounded(text: str, dtype: torch.dtype) -> str:
    """Returns an expression rounded to a dtype, in fp32."""
    return f"({text}).to({_TYPES[dtype]}).to(tl.float32)" if dtype in _TYPES else text


def _indented(statements: Sequence[str], depth: int) -> Iterator[str]:
    for statement in statements:
        yield "    " * depth + statement

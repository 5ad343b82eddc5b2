"""A graph to a program: who lives where, what is called how, and what is not called at all.

For ``backward_recompute`` of Linear, ReLU, Linear, the joint graph's 20 nodes become 8 calls::

    graph                               program
    t = t(w1)                           (a view: built once, no step)
    addmm = addmm(b1, x, t)             addmm@0   = addmm(b1, x, w1')
    relu = relu(addmm)                  relu@0    = clamp_min(addmm, 0)        in place of addmm
    mm_1 = mm(t(g), relu)               grad w2   = mm(g', relu)               first micro-batch
                                        grad w2   = addmm(grad w2, g', relu)   later ones
    mm = mm(g, t(t(w2)))                mm@4096   = mm(g, w2)
    ...
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from gpipe_fast._extension import When
from gpipe_fast.alias import Source, count_reads, source_of
from gpipe_fast.arena import Lifetime, lay_out
from gpipe_fast.exactness import accumulates_exactly
from gpipe_fast.operators import OperatorCall, is_pointwise, returning, writing
from gpipe_fast.program import Accumulate, Call, Home, Make, Program, Ref, Release, Step, Take, Value
from gpipe_fast.split import StageGraph
from gpipe_fast.trace import Role, layer_of

aten = torch.ops.aten


def lower(graph: StageGraph) -> Program:
    """Lowers one graph of a stage.

    Returns:
        A program that computes the graph's results with the graph's bits.
    """
    return _Lowering(graph).run()


def lower_plainly(graph: StageGraph) -> Program:
    """Every operator of the graph, views too, as a call of its own: what ``lower`` is measured against."""
    return _Lowering(graph, plain=True).run()


class _Lowering:
    def __init__(self, graph: StageGraph, plain: bool = False) -> None:
        self.graph = graph
        self.plain = plain
        self.nodes: list[fx.Node] = list(graph.module.graph.nodes)
        self.sources: dict[fx.Node, Source] = {n: Source(n, 0) if plain else source_of(n) for n in self.nodes}
        self.program = Program(graph.name)
        self.index: dict[fx.Node, int] = {}  # base -> value
        self.views: dict[tuple[Any, ...], int] = {}
        self.gradient_of: dict[fx.Node, _Gradient] = {}  # base written straight into an accumulator -> which
        self.lasting: set[fx.Node] = set()  # bases that leave the program

    def run(self) -> Program:
        program = self.program
        self._add_placeholders()
        results = [n for n in self.graph.outputs if n.port.role is not Role.PARAMETER_GRADIENT]
        gradients = [
            _Gradient(n.port.index, n.node)
            for n in self.graph.outputs
            if n.port.role is Role.PARAMETER_GRADIENT
        ]
        self.lasting = {self.sources[n.node].base for n in results}
        if not self.plain:
            self._choose_written_gradients(gradients)
        for node in self.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                self._add_call(node)
        for gradient in gradients:
            self._finish_gradient(gradient)
        program.gradients = tuple(g.index for g in gradients)
        program.outputs = tuple(n.port for n in results)
        program.results = [self._result(n.node, n.port.role) for n in results]
        _place(program)
        return program

    # Values

    def _add(self, name: str, home: Home, like: Tensor, **where: Any) -> int:
        value = Value(name, home, tuple(like.shape), tuple(like.stride()), like.dtype, **where)
        self.program.values.append(value)
        return len(self.program.values) - 1

    def _add_placeholders(self) -> None:
        inputs = []
        for port, node in self.graph.inputs:
            if port.role is Role.PARAMETER:
                self.index[node] = self._add(str(port), Home.PARAMETER, node.meta["val"], index=port.index)
            else:
                self.index[node] = self._add(str(port), Home.INPUT, node.meta["val"])
                inputs.append(port)
        self.program.inputs = tuple(inputs)
        for node in self.nodes:
            if node.op == "get_attr":
                constant = getattr(self.graph.module, str(node.target))
                self.index[node] = self._add(node.name, Home.CONSTANT, constant, constant=constant)

    def _view(self, name: str, base: int, offset: int, like: Tensor) -> int:
        """The value ``base`` looked at as ``like`` is laid out."""
        whole = self.program.values[base]
        if offset == 0 and whole.sizes == tuple(like.shape) and whole.strides == tuple(like.stride()):
            return base
        key = (base, offset, tuple(like.shape), tuple(like.stride()))
        if key not in self.views:
            self.views[key] = self._add(name, Home.VIEW, like, index=base, offset=offset)
        return self.views[key]

    def _value(self, node: fx.Node) -> int:
        base, offset = self.sources[node]
        return self._view(node.name, self.index[base], offset, node.meta["val"])

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return Ref(self._value(argument))
        if isinstance(argument, (list, tuple)):
            return [self._argument(a) for a in argument]
        return argument

    # Calls

    def _add_call(self, node: fx.Node) -> None:
        if self.sources[node].base is not node or self._is_multiple_view(node):
            return
        gradient = self.gradient_of.get(node)
        if gradient is not None:
            self._add_written_gradient(node, gradient)
            return
        metas = node.meta["val"]
        many = isinstance(metas, (list, tuple))
        bases = self._results_of(node, len(metas)) if many else [node]
        call = None if self.plain else writing(node)
        if call is None:
            call = returning(node)
            slots = [None if b is None else self._add_base(b, Home.RESULT) for b in bases]
            self._append(call, tuple(slots), node)
            return
        outs = []
        for position, base in enumerate(bases):
            if base is None:  # read by nobody, but the kernel writes it
                outs.append(self._add(f"{node.name}_{position}", Home.ARENA, metas[position]))
            else:
                lasts = base in self.lasting
                outs.append(self._add_base(base, Home.FRESH if lasts else Home.ARENA))
                if lasts:
                    self.program.steps.append(Make(outs[-1], When.ALWAYS))
        self._append(call, outs, node)

    def _is_multiple_view(self, node: fx.Node) -> bool:
        # split, unbind: each getitem is a view of the argument, the call itself is nothing.
        users = list(node.users)
        return bool(users) and all(
            u.target is operator.getitem and self.sources[u].base is not u for u in users
        )

    @staticmethod
    def _results_of(node: fx.Node, count: int) -> list[fx.Node | None]:
        found: list[fx.Node | None] = [None] * count
        for user in node.users:
            if user.target is operator.getitem and isinstance(user.args[1], int):
                found[user.args[1]] = user
        return found

    def _add_base(self, base: fx.Node, home: Home) -> int:
        value = base.meta.get("val")
        like = value if isinstance(value, Tensor) else torch.empty(0, device="meta")
        self.index[base] = self._add(base.name, home, like)
        return self.index[base]

    def _append(
        self, call: OperatorCall, outs: Iterable[int | None], node: fx.Node, when: When = When.ALWAYS
    ) -> None:
        arguments = [self._argument(a) for a in call.arguments]
        results = None
        if call.writes is None:
            results = tuple(outs)
        else:
            for position, out in zip(call.writes, outs, strict=True):
                assert out is not None
                arguments[position] = Ref(out)
        self.program.steps.append(Call(call.op, tuple(arguments), results, when, layer_of(node)))

    def _copied(self, name: str, value: int, like: Tensor) -> int:
        """A tensor of its own with the value's elements."""
        copy = self._add(name, Home.FRESH, like)
        self.program.steps.append(Make(copy, When.ALWAYS))
        self.program.steps.append(_copy(copy, value, When.ALWAYS))
        return copy

    def _result(self, node: fx.Node, role: Role) -> int:
        base = self.sources[node].base
        value = self._value(node)
        source = self.program.values[self.index[base]]
        # What a step or the user changes in place later must not be what was handed out before.
        changes = source.home in (Home.PARAMETER, Home.CONSTANT) or _is_buffer(base, self.graph)
        shared = source.home is Home.INPUT and role in (Role.BUFFER, Role.SAVED)
        whole = source.home is Home.INPUT or _count(source) == node.meta["val"].numel()
        if (changes or shared or not whole) and not self.plain:
            return self._copied(f"{node.name}_copy", value, node.meta["val"])
        return value

    # Gradients of parameters

    def _choose_written_gradients(self, gradients: list[_Gradient]) -> None:
        """Finds those whose first contribution an operator can write into the accumulator itself."""
        for gradient in gradients:
            gradient.parts = _contributions(gradient.node, self._uses_of_parameter(gradient.index))
            part = gradient.parts[0]
            base, offset = self.sources[part]
            value = base.meta.get("val")
            if base.op != "call_function" or base.target is operator.getitem or not isinstance(value, Tensor):
                continue
            whole = offset == 0 and value.numel() == part.meta["val"].numel() and _is_dense(value)
            alone = (
                base not in self.lasting and base not in self.gradient_of and self._only_leads_to(base, part)
            )
            if whole and alone and value.dtype == part.meta["val"].dtype and writing(base) is not None:
                self.gradient_of[base] = gradient

    def _uses_of_parameter(self, index: int) -> int:
        return self.graph.parameter_uses.get(index, 1)

    def _only_leads_to(self, base: fx.Node, part: fx.Node) -> bool:
        """Whether nothing reads ``base`` but views on the way to ``part``, read once as a gradient."""
        pending, seen = [base], {base}
        while pending:
            node = pending.pop()
            for user in node.users:
                if node is part:
                    if sum(count_reads(u, part) for u in part.users) > 1:
                        return False
                elif self.sources[user].base is not base:
                    return False
                elif user not in seen:
                    seen.add(user)
                    pending.append(user)
        return part in seen

    def _add_written_gradient(self, node: fx.Node, gradient: _Gradient) -> None:
        steps = self.program.steps
        part, like = gradient.parts[0], node.meta["val"]
        gradient.value = self._add(
            f"grad_{gradient.index}", Home.ACCUMULATOR, part.meta["val"], index=gradient.index
        )
        target = self._view(f"grad_{gradient.index}", gradient.value, 0, like)
        call = writing(node)
        assert call is not None
        steps.append(Make(gradient.value, When.FIRST))
        self._append(call, [target], node, When.FIRST)
        if call.op is aten.mm.out and accumulates_exactly(*(a.meta["val"] for a in call.arguments[:2])):
            fused = OperatorCall(aten.addmm.out, (None, *call.arguments[:2], 1, 1, None), (0, 5))
            self._append(fused, [target, target], node, When.LATER)
        else:
            self.index[node] = self._add(node.name, Home.ARENA, like)
            self._append(call, [self.index[node]], node, When.LATER)
            steps.append(Accumulate(target, self.index[node], When.LATER))
        self.index.setdefault(node, target)

    def _finish_gradient(self, gradient: _Gradient) -> None:
        """Adds what no operator has written: whole gradients, and further uses of tied parameters."""
        steps = self.program.steps
        parts = gradient.parts or [gradient.node]
        if gradient.value is None:
            part = parts[0]
            value, like = self._value(part), part.meta["val"]
            base = self.sources[part].base
            home = self.program.values[self.index[base]].home
            lone = self._only_leads_to(base, part) and base not in self.lasting
            if (
                home is Home.RESULT
                and lone
                and _is_dense(like)
                and _count(self.program.values[self.index[base]]) == like.numel()
            ):
                gradient.value = self._add(
                    f"grad_{gradient.index}", Home.ACCUMULATOR, like, index=gradient.index
                )
                steps.append(Take(gradient.value, value))
            else:
                dense = like if _is_dense(like) else torch.empty(like.shape, dtype=like.dtype, device="meta")
                gradient.value = self._add(
                    f"grad_{gradient.index}", Home.ACCUMULATOR, dense, index=gradient.index
                )
                steps.append(Make(gradient.value, When.FIRST))
                steps.append(_copy(gradient.value, value, When.FIRST))
            steps.append(Accumulate(gradient.value, value, When.LATER))
        for part in parts[1:]:
            steps.append(Accumulate(gradient.value, self._value(part), When.ALWAYS))


class _Gradient:
    """The gradient of one parameter on its way into the accumulator."""

    def __init__(self, index: int, node: fx.Node) -> None:
        self.index = index
        self.node = node
        self.parts: list[fx.Node] = []
        self.value: int | None = None


def _contributions(node: fx.Node, uses: int) -> list[fx.Node]:
    """The terms of a gradient that autograd summed, in its order.

    Autograd adds the gradient of each use of a parameter to one running sum over all micro-batches; adding
    up within a micro-batch first would round differently.
    """
    parts: list[fx.Node] = []
    while (
        len(parts) + 1 < uses and node.target is aten.add.Tensor and not node.kwargs and len(node.users) == 1
    ):
        left, right = node.args
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
            break
        parts.append(right)
        node = left
    return [node, *reversed(parts)]


def _copy(target: int, value: int, when: When) -> Call:
    return Call(aten.copy_.default, (Ref(target), Ref(value), False), None, when, None)


def _is_buffer(node: fx.Node, graph: StageGraph) -> bool:
    return any(n.node is node and n.port.role is Role.BUFFER for n in graph.inputs)


def _count(value: Value) -> int:
    count = 1
    for size in value.sizes:
        count *= size
    return count


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a block of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(
        (st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


# Placement


def _place(program: Program) -> None:
    """Gives arena values their offsets and drops the others after their last use."""
    values, steps = program.values, program.steps
    base_of = [v.index if v.home is Home.VIEW else i for i, v in enumerate(values)]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, step in enumerate(steps):
        for used in _used(step):
            first.setdefault(base_of[used], position)
            last[base_of[used]] = position
    kept = {base_of[r] for r in program.results}

    lifetimes = {
        i: Lifetime(_bytes(v), first[i], last[i], _reusable(program, steps[first[i]], i, base_of))
        for i, v in enumerate(values)
        if v.home is Home.ARENA and i in first
    }
    offsets, program.arena_bytes = lay_out(lifetimes)
    for i, offset in offsets.items():
        v = values[i]
        values[i] = Value(v.name, v.home, v.sizes, v.strides, v.dtype, offset)

    ends: dict[int, list[int]] = {}
    for i, v in enumerate(values):
        if v.home in (Home.FRESH, Home.RESULT) and i in last and i not in kept:
            ends.setdefault(last[i], []).append(i)
    program.steps = [
        s
        for position, step in enumerate(steps)
        for s in (step, *(Release(v) for v in ends.get(position, ())))
    ]


def _used(step: Step) -> list[int]:
    match step:
        case Call(_, arguments, results):
            return [*_refs(arguments), *(r for r in results or () if r is not None)]
        case Make(value) | Release(value):
            return [value]
        case Accumulate(accumulator, value) | Take(accumulator, value):
            return [accumulator, value]


def _refs(argument: Any) -> list[int]:
    if isinstance(argument, Ref):
        return [argument.value]
    if isinstance(argument, (list, tuple)):
        return [r for a in argument for r in _refs(a)]
    return []


def _reusable(program: Program, step: Step, value: int, base_of: list[int]) -> tuple[int, ...]:
    """Arguments of an element-by-element call whose memory its result may take over."""
    if not isinstance(step, Call) or step.results is not None or not is_pointwise(step.op):
        return ()
    refs = [r for r in _refs(step.arguments) if r != value]
    own = program.values[value]
    found = []
    for ref in refs:
        other = program.values[ref]
        same = (other.sizes, other.strides, other.dtype) == (own.sizes, own.strides, own.dtype)
        # Another view of the same memory might be read after it was overwritten.
        if same and other.home is Home.ARENA and all(r == ref for r in refs if base_of[r] == ref):
            found.append(ref)
    return tuple(found)


def _bytes(value: Value) -> int:
    if not _count(value):
        return 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.sizes, value.strides, strict=True))
    return span * value.dtype.itemsize

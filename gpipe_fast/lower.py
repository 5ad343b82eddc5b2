"""A graph to a program: who lives where, what is called how, and what is not called at all.

For ``backward_recompute`` of Linear, ReLU, Linear, 23 nodes become 9 calls a run::

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

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from gpipe_fast._extension import When
from gpipe_fast.alias import Source, source_of
from gpipe_fast.exactness import accumulates_exactly
from gpipe_fast.gradients import Gradient, contributions, is_dense, only_leads_to
from gpipe_fast.operators import OperatorCall, returning, writing
from gpipe_fast.placement import parts, place
from gpipe_fast.program import Accumulate, Call, Home, Make, Program, Ref, Take, Value
from gpipe_fast.refuse import layer_of
from gpipe_fast.split import JOINT_POSITION, StageGraph
from gpipe_fast.trace import Role

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
        self.gradient_of: dict[fx.Node, Gradient] = {}  # base written straight into an accumulator -> which
        self.lasting: set[fx.Node] = set()  # bases that leave the program

    def run(self) -> Program:
        program = self.program
        self._add_placeholders()
        results = [n for n in self.graph.outputs if n.port.role is not Role.PARAMETER_GRADIENT]
        gradients = self._gradients()
        self.lasting = {self.sources[n.node].base for n in results}
        for gradient in () if self.plain else gradients:
            self._choose_written(gradient)
        due = self._due(gradients)
        for node in self.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                self._add_call(node)
            for gradient in due.get(node, ()):
                self._finish_gradient(gradient)
        program.gradients = tuple(g.index for g in gradients)
        program.outputs = tuple(n.port for n in results)
        program.results = [self._result(n.node, n.port.role) for n in results]
        place(program)
        program.parts = parts(program)
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
                saved = int(port.role is Role.SAVED)
                self.index[node] = self._add(str(port), Home.INPUT, node.meta["val"], index=saved)
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
        shared = source.home is Home.INPUT and role is Role.BUFFER
        if (changes or shared) and not self.plain:
            return self._copied(f"{node.name}_copy", value, node.meta["val"])
        return value

    # Gradients of parameters

    def _gradients(self) -> list[Gradient]:
        """One for each parameter; a tied one has a gradient under each name, and their terms join."""
        found: dict[int, Gradient] = {}
        for port, node in self.graph.outputs:
            if port.role is Role.PARAMETER_GRADIENT:
                parts = self._contributions(Gradient(port.index, node))
                gradient = found.setdefault(port.index, Gradient(port.index, node))
                gradient.parts = (
                    sorted(gradient.parts + parts, key=lambda n: n.meta.get(JOINT_POSITION, -1))
                    if gradient.parts
                    else parts
                )
        return list(found.values())

    def _contributions(self, gradient: Gradient) -> list[fx.Node]:
        if self.plain:
            return [gradient.node]
        return contributions(gradient.node, self.graph.parameter_uses.get(gradient.index, 1))

    def _choose_written(self, gradient: Gradient) -> None:
        """Notes whether an operator can write the first contribution into the accumulator itself."""
        part = gradient.parts[0]
        base, offset = self.sources[part]
        value, like = base.meta.get("val"), part.meta["val"]
        if base.op != "call_function" or base.target is operator.getitem or not isinstance(value, Tensor):
            return
        whole = offset == 0 and value.numel() == like.numel() and value.dtype == like.dtype
        alone = base not in self.lasting and base not in self.gradient_of and only_leads_to(base, part)
        if whole and is_dense(value) and alone and writing(base) is not None:
            self.gradient_of[base] = gradient

    def _due(self, gradients: list[Gradient]) -> dict[fx.Node, list[Gradient]]:
        """After which node the last contribution to each gradient has been made."""
        order = {node: position for position, node in enumerate(self.nodes)}
        due: dict[fx.Node, list[Gradient]] = {}
        for gradient in gradients:
            bases = [self.sources[part].base for part in gradient.parts]
            made = [b.args[0] if b.target is operator.getitem else b for b in bases]
            last = max((m for m in made if isinstance(m, fx.Node)), key=order.__getitem__)
            due.setdefault(last, []).append(gradient)
        return due

    def _add_written_gradient(self, node: fx.Node, gradient: Gradient) -> None:
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

    def _finish_gradient(self, gradient: Gradient) -> None:
        """Adds what no operator has written: whole gradients, and further uses of tied parameters."""
        steps = self.program.steps
        if gradient.value is None:
            part = gradient.parts[0]
            value, like = self._value(part), part.meta["val"]
            base = self.sources[part].base
            home = self.program.values[self.index[base]].home
            lone = only_leads_to(base, part) and base not in self.lasting
            if (
                home is Home.RESULT
                and lone
                and is_dense(like)
                and math.prod(self.program.values[self.index[base]].sizes) == like.numel()
            ):
                gradient.value = self._add(
                    f"grad_{gradient.index}", Home.ACCUMULATOR, like, index=gradient.index
                )
                steps.append(Take(gradient.value, value))
            else:
                dense = like if is_dense(like) else torch.empty(like.shape, dtype=like.dtype, device="meta")
                gradient.value = self._add(
                    f"grad_{gradient.index}", Home.ACCUMULATOR, dense, index=gradient.index
                )
                steps.append(Make(gradient.value, When.FIRST))
                steps.append(_copy(gradient.value, value, When.FIRST))
            steps.append(Accumulate(gradient.value, value, When.LATER))
        for part in gradient.parts[1:]:
            steps.append(Accumulate(gradient.value, self._value(part), When.ALWAYS))


def _copy(target: int, value: int, when: When) -> Call:
    return Call(aten.copy_.default, (Ref(target), Ref(value), False), None, when, None)


def _is_buffer(node: fx.Node, graph: StageGraph) -> bool:
    return any(n.node is node and n.port.role is Role.BUFFER for n in graph.inputs)

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
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from gpipe_fast._extension import ActiveRuns
from gpipe_fast.lower.accumulation import AccumulationPolicy, PendingAccumulations
from gpipe_fast.lower.alias import getitem_nodes, is_elided_copy, readers_of
from gpipe_fast.lower.gradients import Gradient, gradient_terms, is_dense, is_read_only_through
from gpipe_fast.lower.launch import KernelLaunch, changed_input, is_launch
from gpipe_fast.lower.memory import MemoryPlan, parts, plan_memory
from gpipe_fast.lower.operators import (
    OperatorCall,
    functional_call,
    may_stand_for_change,
    out_call,
    schema_order_arguments,
)
from gpipe_fast.lower.program import ProgramIR, StorageKind
from gpipe_fast.lower.split import JOINT_POSITION, StageGraph
from gpipe_fast.lower.steps import Accumulate, AdoptAsAccumulator, Allocate, Call, Check, Launch, Ref
from gpipe_fast.lower.values import GraphValues
from gpipe_fast.strides import bits_of, contiguous
from gpipe_fast.trace.joint_graph import GraphRole
from gpipe_fast.trace.tensor_metadata import AnyTensor, TensorMetadata
from gpipe_fast.trace.traceability import layer_of

aten = torch.ops.aten

# The memory of these values outlives a run.
_LONG_LIVED = (StorageKind.PARAMETER, StorageKind.PARAMETER_CAST, StorageKind.CONSTANT)

_DEFAULT_ACCUMULATION = AccumulationPolicy()


def lower(graph: StageGraph, accumulation: AccumulationPolicy = _DEFAULT_ACCUMULATION) -> ProgramIR:
    """Lowers one graph of a stage.

    Args:
        graph: the graph.
        accumulation: how gradients of parameters are accumulated.

    Returns:
        A program that computes the graph's results with the graph's bits.
    """
    program, memory = lower_unplaced(graph, accumulation)
    memory.place(program)
    return program


def lower_unplaced(graph: StageGraph, accumulation: AccumulationPolicy) -> tuple[ProgramIR, MemoryPlan]:
    """Lowers one graph of a stage, but leaves it to the memory plan to assign offsets.

    Sizes may be formulas (gpipe_fast/trace/formulas.py).
    """
    return _Lowering(graph, accumulation).run()


class _Lowering:
    def __init__(self, graph: StageGraph, accumulation: AccumulationPolicy) -> None:
        self.graph = graph
        self.accumulation = accumulation
        self.nodes: list[fx.Node] = list(graph.module.graph.nodes)
        self.program = ProgramIR()
        self.values = GraphValues(self.program, graph)
        # Base whose operator writes directly into an accumulator -> the gradient in that accumulator.
        self.direct_gradient_of: dict[fx.Node, Gradient] = {}
        self.returned_bases: set[fx.Node] = set()  # bases that the program returns
        # Sums that are elided, because their terms are accumulated instead.
        self.elided_sums: set[fx.Node] = set()
        self.pending = PendingAccumulations()

    def run(self) -> tuple[ProgramIR, MemoryPlan]:
        program = self.program
        self.values.add_placeholders()
        results = [n for n in self.graph.outputs if n.port.role is not GraphRole.PARAMETER_GRADIENT]
        gradients = self._gradients()
        self.returned_bases = {self.values.sources[n.node].base for n in results}
        self.elided_sums -= self.returned_bases | {
            self.values.sources[part].base for g in gradients for part in g.parts
        }
        for gradient in gradients:
            self._mark_direct_write(gradient)
        complete_after = self._gradients_by_last_node(gradients)
        for node in self.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                self._add_call(node)
            for gradient in complete_after.get(node, ()):
                self._finish_gradient(gradient)
        program.steps += self.pending.flush()
        program.gradients = tuple(g.index for g in gradients)
        program.outputs = tuple(n.port for n in results)
        outputs = [self.values.sources[n.node].base for n in results if n.port.role is GraphRole.OUTPUT]
        program.results = [self._result(n.node, n.port.role, outputs) for n in results]
        memory = plan_memory(program, self._device())
        program.parts = parts(program)
        return program, memory

    def _device(self) -> torch.device:
        """Returns the one device that holds all values."""
        tensors = (node.meta.get("val") for node in self.nodes)
        return next((t.device for t in tensors if isinstance(t, AnyTensor)), torch.device("cpu"))

    # Calls

    def _add_call(self, node: fx.Node) -> None:
        owns_memory = self.values.sources[node].base is node
        if not owns_memory or self._returns_only_views(node) or node in self.elided_sums:
            return
        gradient = self.direct_gradient_of.get(node)
        if gradient is not None:
            self._add_direct_gradient(node, gradient)
            return
        if is_launch(node):
            self._add_launch(node)
            return
        if node.target is aten.as_strided_scatter.default:
            self._add_strided_scatter(node)
            return
        values = node.meta["val"]
        bases = getitem_nodes(node, len(values)) if isinstance(values, (list, tuple)) else [node]
        call = out_call(node)
        if call is None:
            call = functional_call(node)
            slots = [None if b is None else self.values.add_base(b, StorageKind.RESULT) for b in bases]
            if slots[0] is not None and may_stand_for_change(node):
                self.values.keep_traced_layout(slots[0])
            self._append(call, tuple(slots), node)
            return
        self._append(call, self._add_outputs(node, bases), node)

    def _add_launch(self, node: fx.Node) -> None:
        launch, arguments, check, checked, earlier = node.args
        assert isinstance(launch, KernelLaunch)
        bases = getitem_nodes(node, len(launch.outputs))
        given = self.values.argument(arguments)
        results = self._add_outputs(node, bases)
        for position, result in zip(launch.outputs, results, strict=True):
            initial = given[position]
            if isinstance(initial, Ref) and initial.value != result:
                self.program.steps.append(_copy(result, initial.value, ActiveRuns.ALWAYS))
            given[position] = Ref(result)
        for argument in given:
            if isinstance(argument, Ref):  # the kernel was given the strides of the trace
                self.values.keep_traced_layout(argument.value)
        self.program.steps.append(Launch(launch, tuple(given), ActiveRuns.ALWAYS, layer_of(node)))
        if check is not None:
            inputs, before = ([r.value for r in self.values.argument(nodes)] for nodes in (checked, earlier))
            self.program.steps.append(Check(check, tuple(inputs), (*before, *results)))

    def _add_strided_scatter(self, node: fx.Node) -> None:
        """Copies a tensor, then another one into a view of the copy.

        The operator itself counts the offset from the start of the memory, which other values use, too.
        """
        whole, part, sizes, strides, offset = schema_order_arguments(aten.as_strided_scatter.default, node)
        like, seen = node.meta["val"], whole.meta["val"]
        layout = TensorMetadata(tuple(sizes), tuple(strides), 0, like.dtype, like.device, bits_of(like))
        (copy,) = self._add_outputs(node, [node])
        view = self.values.view(
            node.name, copy, 0 if offset is None else offset - seen.storage_offset(), layout
        )
        for target, value in ((copy, whole), (view, part)):
            self.program.steps.append(_copy(target, self.values.of(value), ActiveRuns.ALWAYS))

    def _add_outputs(self, node: fx.Node, bases: Sequence[fx.Node | None]) -> list[int]:
        """Returns the values of an operator's outputs; allocates those that the program returns."""
        outs = []
        for position, base in enumerate(bases):
            if base is None:  # an unused result, which the kernel writes nevertheless
                unused = node.meta["val"][position]
                outs.append(self.values.add(f"{node.name}_{position}", StorageKind.ARENA, unused))
                continue
            is_returned = base in self.returned_bases
            changed = self._changed_in_place(node, position, is_returned)
            if changed is not None:
                outs.append(self.values.view(base.name, changed, 0, base.meta["val"]))
                self.values.index[base] = changed
            else:
                storage = StorageKind.FRESH if is_returned else StorageKind.ARENA
                outs.append(self.values.add_base(base, storage))
                if is_returned:
                    self.program.steps.append(Allocate(outs[-1], ActiveRuns.ALWAYS))
        return outs

    def _changed_in_place(self, node: fx.Node, position: int, is_returned: bool) -> int | None:
        """Returns the value that a kernel changes itself, not a copy, because only this kernel reads it."""
        initial = changed_input(node, position)
        if initial is None or len(readers_of(self.values.sources[initial].base)) != 1:
            return None
        source, offset = self.values.sources[initial]
        value = self.program.values[self.values.index[source]]
        whole = (offset, math.prod(value.sizes)) == (0, initial.meta["val"].numel())
        owned = [StorageKind.RESULT] + [StorageKind.ARENA] * (not is_returned)
        return self.values.index[source] if whole and value.storage in owned else None

    def _returns_only_views(self, node: fx.Node) -> bool:
        # For split and unbind each getitem is a view of the argument, so the call itself is not needed.
        users = list(node.users)
        return bool(users) and all(
            u.target is operator.getitem and self.values.sources[u].base is not u for u in users
        )

    def _append(
        self,
        call: OperatorCall,
        outs: Iterable[int | None],
        node: fx.Node,
        when: ActiveRuns = ActiveRuns.ALWAYS,
    ) -> None:
        arguments = [self.values.argument(a) for a in call.arguments]
        results = None
        if call.out_positions is None:
            results = tuple(outs)
        else:
            for position, out in zip(call.out_positions, outs, strict=True):
                assert out is not None
                arguments[position] = Ref(out)
        self.program.steps.append(Call(call.op, tuple(arguments), results, when, layer_of(node)))

    def _copy_of(self, node: fx.Node) -> int:
        """Adds steps that copy a node's value to a fresh tensor, and returns the copy.

        Of an expanded tensor, each element is copied once, and the copy is expanded.
        """
        name, like = f"{node.name}_copy", node.meta["val"]
        sizes = tuple(1 if n == 0 else size for size, n in zip(like.shape, like.stride(), strict=True))
        once = TensorMetadata(sizes, tuple(like.stride()), 0, like.dtype, like.device, bits_of(like))
        base, offset = self.values.sources[node]
        value = self.values.view(name, self.values.index[base], offset, once)
        copy = self.values.add(name, StorageKind.FRESH, once)
        self.program.steps.append(Allocate(copy, ActiveRuns.ALWAYS))
        self.program.steps.append(_copy(copy, value, ActiveRuns.ALWAYS))
        return self.values.view(f"{name}_expanded", copy, 0, like)

    def _result(self, node: fx.Node, role: GraphRole, outputs: Sequence[fx.Node]) -> int:
        base = self.values.sources[node].base
        source = self.program.values[self.values.index[base]]
        # A result must not alias memory that a later step or the user changes in place.
        changes = source.storage in _LONG_LIVED or _is_buffer(base, self.graph)
        shared = source.storage is StorageKind.INPUT and role is GraphRole.BUFFER
        # Nor other outputs of which the model copies it: the layers that follow may change one in place.
        shared = shared or (outputs.count(base) > 1 and is_elided_copy(node))
        if changes or shared:
            return self._copy_of(node)
        return self.values.of(node)

    # Gradients of parameters

    def _gradients(self) -> list[Gradient]:
        """Returns one gradient per parameter; for a tied parameter, with the terms of all its names."""
        found: dict[int, list[fx.Node]] = {}
        for port, node in self.graph.outputs:
            if port.role is GraphRole.PARAMETER_GRADIENT:
                found.setdefault(port.index, []).append(node)
        return [self._gradient(index, nodes) for index, nodes in found.items()]

    def _gradient(self, index: int, nodes: list[fx.Node]) -> Gradient:
        gradient = Gradient(index)
        for node in nodes:
            keep_whole = len(nodes) == 1 and self.accumulation.has_wider_accumulator(node.meta["val"])
            uses = 1 if keep_whole else self.graph.parameter_uses.get(index, 1)
            parts, sums = gradient_terms(node, uses)
            gradient.parts += parts
            self.elided_sums.update(sums)
        if len(nodes) > 1:
            gradient.parts.sort(key=lambda n: n.meta.get(JOINT_POSITION, -1))
        return gradient

    def _mark_direct_write(self, gradient: Gradient) -> None:
        """Records whether an operator can write the first contribution directly into the accumulator."""
        part = gradient.parts[0]
        base, offset = self.values.sources[part]
        value, like = base.meta.get("val"), part.meta["val"]
        if base.op != "call_function" or base.target is operator.getitem or not isinstance(value, AnyTensor):
            return
        whole = offset == 0 and value.numel() == like.numel() and value.dtype == like.dtype
        whole = whole and bits_of(value) == bits_of(like)
        whole = whole and not self.accumulation.has_wider_accumulator(like)
        alone = (
            base not in self.returned_bases
            and base not in self.direct_gradient_of
            and is_read_only_through(base, part)
        )
        if whole and is_dense(value) and alone and out_call(base) is not None:
            self.direct_gradient_of[base] = gradient

    def _gradients_by_last_node(self, gradients: list[Gradient]) -> dict[fx.Node, list[Gradient]]:
        """Returns, by node, the gradients whose last contribution that node computes."""
        order = {node: position for position, node in enumerate(self.nodes)}
        complete_after: dict[fx.Node, list[Gradient]] = {}
        for gradient in gradients:
            bases = [self.values.sources[part].base for part in gradient.parts]
            producers = [b.args[0] if b.target is operator.getitem else b for b in bases]
            last = max((m for m in producers if isinstance(m, fx.Node)), key=order.__getitem__)
            complete_after.setdefault(last, []).append(gradient)
        return complete_after

    def _add_direct_gradient(self, node: fx.Node, gradient: Gradient) -> None:
        steps = self.program.steps
        part, like = gradient.parts[0], node.meta["val"]
        gradient.value = self.values.add(
            f"grad_{gradient.index}", StorageKind.ACCUMULATOR, part.meta["val"], index=gradient.index
        )
        target = self.values.view(f"grad_{gradient.index}", gradient.value, 0, like)
        call = out_call(node)
        assert call is not None
        steps.append(Allocate(gradient.value, ActiveRuns.FIRST))
        self._append(call, [target], node, ActiveRuns.FIRST)
        operands = [a.meta["val"] for a in call.arguments[:2]] if call.op is aten.mm.out else []
        if operands and self.accumulation.can_use_addmm(*operands):
            fused = OperatorCall(aten.addmm.out, (None, *call.arguments[:2], 1, 1, None), (0, 5))
            self._append(fused, [target, target], node, ActiveRuns.LATER)
        elif self.accumulation.can_skip_cast(node):
            uncast = node.args[0]
            assert isinstance(uncast, fx.Node)
            self._accumulate(gradient, target, self.values.of(uncast), uncast.meta["val"])
        else:
            self.values.index[node] = self.values.add(node.name, StorageKind.ARENA, like)
            self._append(call, [self.values.index[node]], node, ActiveRuns.LATER)
            self._accumulate(gradient, target, self.values.index[node], like)
        self.values.index.setdefault(node, target)

    def _finish_gradient(self, gradient: Gradient) -> None:
        """Adds the steps for contributions that no operator writes directly into the accumulator.

        These are whole gradients, and the contributions of a tied parameter's further uses.
        """
        steps, name, part = self.program.steps, f"grad_{gradient.index}", gradient.parts[0]
        like = part.meta["val"]
        if self.accumulation.has_wider_accumulator(like):
            self._sum_parts(gradient)
        if gradient.value is None:
            value = self.values.of(part) if gradient.sum is None else gradient.sum
            if self._can_adopt(part):
                gradient.value = self.values.add(name, StorageKind.ACCUMULATOR, like, index=gradient.index)
                steps.append(AdoptAsAccumulator(gradient.value, value))
            else:
                layout = like.stride() if is_dense(like) else contiguous(like.shape)
                dense = TensorMetadata(
                    tuple(like.shape), layout, 0, self.accumulation.sum_dtype(like), like.device
                )
                gradient.value = self.values.add(name, StorageKind.ACCUMULATOR, dense, index=gradient.index)
                steps.append(Allocate(gradient.value, ActiveRuns.FIRST))
                steps.append(_copy(gradient.value, value, ActiveRuns.FIRST))
            self._accumulate(gradient, gradient.value, value, like)
        for part in gradient.parts[1:] if gradient.sum is None else ():
            steps.append(Accumulate(gradient.value, self.values.of(part), ActiveRuns.ALWAYS))

    def _can_adopt(self, part: fx.Node) -> bool:
        """Returns whether a contribution can become the accumulator because nothing else reads its memory."""
        base, like = self.values.sources[part].base, part.meta["val"]
        whole = self.program.values[self.values.index[base]]
        lone = is_read_only_through(base, part) and base not in self.returned_bases
        fits = is_dense(like) and math.prod(whole.sizes) == like.numel()
        return (
            whole.storage is StorageKind.RESULT
            and lone
            and fits
            and not self.accumulation.has_wider_accumulator(like)
        )

    def _sum_parts(self, gradient: Gradient) -> None:
        """Adds steps that sum the gradient's terms in the gradient's dtype, as autograd does."""
        gradient.sum = self.values.of(gradient.parts[0])
        for part in gradient.parts[1:]:
            like = part.meta["val"]
            total = TensorMetadata(tuple(like.shape), contiguous(like.shape), 0, like.dtype, like.device)
            into = self.values.add(f"{part.name}_sum", StorageKind.ARENA, total)
            arguments = (Ref(gradient.sum), Ref(self.values.of(part)), 1, Ref(into))
            self.program.steps.append(Call(aten.add.out, arguments, None, ActiveRuns.ALWAYS, None))
            gradient.sum = into

    def _accumulate(self, gradient: Gradient, accumulator: int, value: int, like: AnyTensor) -> None:
        """Adds a value to an accumulator in later runs, together with other pending gradients if possible."""
        if len(gradient.parts) > 1 and gradient.sum is None:  # autograd's order of summation
            self.program.steps.append(Accumulate(accumulator, value, ActiveRuns.LATER))
        else:
            self.program.steps += self.pending.add(accumulator, value, like)


def _copy(target: int, value: int, when: ActiveRuns) -> Call:
    return Call(aten.copy_.default, (Ref(target), Ref(value), False), None, when, None)


def _is_buffer(node: fx.Node, graph: StageGraph) -> bool:
    return any(n.node is node and n.port.role is GraphRole.BUFFER for n in graph.inputs)

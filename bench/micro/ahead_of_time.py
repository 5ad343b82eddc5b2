"""Stages that AOTInductor compiles ahead of time, beside our programs and torch.compile: a trial.

A package replaces each graph of a stage, with parameters as inputs; the engine calls it as one operator. A
recompute is a package of its own, because it needs no boundary gradient. Gradients of weights stay ATen
products, which add in place; in '{COMPLETE}', packages return them, and the engine adds.
{CASE.count} GPT blocks of width {CASE.width}, K = 2, {CASE.chunks} x {CASE.batch} x {CASE.length} tokens.
Candidates have a process and two cores each: two stages with one thread, or the whole mini-batch with two
threads. They alternate; medians of {ROUNDS} steps. Gradients are compared with those of the plain loop with
one thread: ours must be equal, others may differ by {TOLERANCE:.0e} of the largest of their tensor.
"""

from __future__ import annotations

import operator
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import fx, nn
from torch.utils import cpp_extension

from bench.compare.step import OTHERS, OURS, RESOURCES, Case, build
from bench.comparison import Comparison, Opened, gradients
from bench.measure import PAUSE, report
from bench.peers import Candidate, Step, checkpointed, in_processes
from gpipe_fast.fuse.fuse import Fused
from gpipe_fast.lower.alias import source_of
from gpipe_fast.lower.split import StageGraph
from gpipe_fast.trace.joint_graph import GraphRole, PortNode
from gpipe_fast.trace.tensor_metadata import AnyTensor

CASE, ROUNDS = Case(), 25
PACKAGES, COMPLETE = "AOTInductor", "AOTInductor, all products"
WHOLE = "torch.compile, whole mini-batch"
CANDIDATES = dict.fromkeys((OURS, PACKAGES, COMPLETE), RESOURCES[OURS]) | {WHOLE: OTHERS}
SOURCE = """
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
#include <torch/library.h>
using Runner = torch::inductor::AOTIModelContainerRunnerCpu;
static std::vector<std::unique_ptr<Runner>> runners;  // loaded before any stage runs
static int64_t load(std::string path) {
  runners.push_back(std::make_unique<Runner>(path, 2));  // two stages may run a package at a time
  return static_cast<int64_t>(runners.size()) - 1;
}
static auto run(int64_t package, at::TensorList inputs) { return runners.at(package)->run(inputs.vec()); }
TORCH_LIBRARY(ahead_of_time, m) {
  m.def("load(str path) -> int", load);
  m.def("run(int package, Tensor[] inputs) -> Tensor[]");
}
TORCH_LIBRARY_IMPL(ahead_of_time, CPU, m) { m.impl("run", run); }
"""


def load_operators() -> None:
    file = Path(tempfile.mkdtemp()) / "ahead_of_time.cpp"
    file.write_text(SOURCE)
    cpp_extension.load("ahead_of_time", [str(file)], is_python_module=False, build_directory=file.parent)


class Packages:
    """Replaces the graphs of stages, as `Fusion` does on a GPU (gpipe_fast/fuse/fuse.py).

    Args:
        all_products: whether gradients of weights are computed in packages, too.
    """

    def __init__(self, all_products: bool = False) -> None:
        self.all_products = all_products
        self._known: dict[object, int] = {}  # by code and layouts of inputs: equal stages share a package

    def fuse(self, forward: StageGraph, backward: StageGraph | None, explain: bool = False) -> list[Fused]:
        return [Fused(_Replacement(self, g).run(), ()) for g in (forward, backward) if g is not None]

    def compile(self, module: fx.GraphModule, inputs: Sequence[fx.Node]) -> int:
        values = (node.meta["val"] for node in inputs)
        layouts = tuple((tuple(v.shape), v.stride(), v.dtype) for v in values)
        if (key := (module.code, layouts)) not in self._known:
            zeros = tuple(torch.empty_strided(*layout, dtype=dtype).zero_() for *layout, dtype in layouts)
            path = torch._inductor.aot_compile(module, zeros)
            self._known[key] = torch.ops.ahead_of_time.load(path)
        return self._known[key]


class _Replacement:
    """A graph that calls packages, while it is made from another."""

    def __init__(self, packages: Packages, graph: StageGraph) -> None:
        self.packages, self.graph = packages, graph
        self.made, self.copies = fx.Graph(), dict[fx.Node, fx.Node]()
        # The package of each node that owns memory; None for products that stay ATen calls.
        self.number: dict[fx.Node, int | None] = {}

    def run(self) -> StageGraph:
        graph = self.graph
        given = (n.node for n in graph.outputs if n.port.role is GraphRole.PARAMETER_GRADIENT)
        weights = {source_of(node).base for node in given}
        late = {n.node for n in graph.inputs if n.port.role is GraphRole.TANGENT}
        for node in graph.module.graph.nodes:
            if not late.isdisjoint(node.all_input_nodes):
                late.add(node)
            if node.op in ("placeholder", "get_attr"):
                self.copies[node] = self.made.node_copy(node)
            elif node.op == "call_function" and not _is_view(node):
                is_left = node in weights and node.target is torch.ops.aten.mm.default
                number = None if is_left and not self.packages.all_products else int(node in late)
                self.number[node] = self.number[node.args[0]] if node.target is operator.getitem else number
        outputs = tuple(PortNode(port, self.copy(node)) for port, node in graph.outputs)
        self.made.output(tuple(node for _, node in outputs))
        inputs = tuple(PortNode(port, self.copies[node]) for port, node in graph.inputs)
        module = fx.GraphModule(graph.module, self.made)
        return StageGraph(graph.name, module, inputs, outputs, graph.parameter_uses)

    def copy(self, node: fx.Node) -> fx.Node:
        if node not in self.copies and self.number.get(node) is not None:
            self._add_package(node)
        elif node not in self.copies:
            for argument in node.all_input_nodes:
                self.copy(argument)
            self.copies[node] = self.made.node_copy(node, self.copies.__getitem__)
        return self.copies[node]

    def _add_package(self, node: fx.Node) -> None:
        number = self.number[node]
        own = [n for n in self.number if self.number[n] == number and isinstance(n.meta["val"], AnyTensor)]
        results = [n for n in own if any(self.number.get(r, -1) != number for r in _readers(n))]
        is_inside, pending = dict[fx.Node, bool](), list(results)
        while pending:
            if (each := pending.pop()) not in is_inside:
                is_inside[each] = each.op == "call_function" and self.number.get(each, number) == number
                pending += each.all_input_nodes if is_inside[each] else ()
        needed = [n for n in self.graph.module.graph.nodes if n in is_inside]
        given = [n for n in needed if not is_inside[n]]
        inner = fx.Graph()
        copies = {n: inner.placeholder(n.name) for n in given}
        for each in needed:
            if is_inside[each]:
                copies[each] = inner.node_copy(each, copies.__getitem__)
                copies[each].meta = {}
        inner.output(tuple(copies[n] for n in results))
        module = fx.GraphModule(self.graph.module, inner)
        arguments = self.packages.compile(module, given), [self.copy(n) for n in given]
        call = self.made.call_function(torch.ops.ahead_of_time.run.default, arguments)
        call.meta = {**node.meta, "val": [n.meta["val"] for n in results]}
        for position, each in enumerate(results):
            self.copies[each] = self.made.call_function(operator.getitem, (call, position))
            self.copies[each].meta = each.meta


def _is_view(node: fx.Node) -> bool:
    is_list = isinstance(node.meta["val"], (list, tuple))
    return all(map(_is_view, node.users)) if is_list else source_of(node).base is not node


def _readers(node: fx.Node) -> Iterator[fx.Node]:  # through views too
    for user in node.users:
        yield from _readers(user) if user.op == "call_function" and _is_view(user) else (user,)


def make(number: int, name: str, port: int, case: Case) -> Candidate:
    """Builds a candidate in its own process, and runs a step, which compiles."""
    if name == WHOLE:
        stages = case.stages()
        forward = torch.compile(checkpointed(stages) if case.recompute else nn.Sequential(*stages))
        step: Candidate = Step([p for stage in stages for p in stage.parameters()], forward, *case.data())
    else:
        step = build(number, OURS, case)
    with ExitStack() as stack:
        if name in (PACKAGES, COMPLETE):
            load_operators()
            packages = Packages(all_products=name == COMPLETE)
            stack.enter_context(mock.patch("gpipe_fast.runtime.compile.fusion_of", return_value=packages))
        step()
    return step


def _opened(case: Case, stack: ExitStack) -> Opened:
    return in_processes(make, CANDIDATES, (case,), stack), case.reference_gradients()


COMPARISONS = [
    Comparison(
        f"{what} recomputed", [*CANDIDATES], partial(_opened, Case(what == "all")), ROUNDS, pause=PAUSE
    )
    for what in ("none", "all")
]


def main() -> None:
    found = [
        [comparison.name, name, each.ms(), each.over(outcomes[OURS]), gradients(name, each)]
        for comparison in COMPARISONS
        for outcomes in (comparison.measure(),)
        for name, each in outcomes.items()
    ]
    report(globals(), "step | candidate | ms: median [p20, p80] | time / ours | gradients", found)

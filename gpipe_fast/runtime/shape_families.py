"""Shape families: a stage's traces that differ only in sizes, and a template for all of these sizes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import compress

from gpipe_fast import progress, switches
from gpipe_fast.runtime.equal_layers import FakeInputs, PartGraphs, trace_stage
from gpipe_fast.runtime.module_warnings import log_graph
from gpipe_fast.runtime.stage import BoundarySpec, Stage
from gpipe_fast.trace.gradient_layouts import GradientLayouts, dim_order
from gpipe_fast.trace.joint_graph import JointGraph
from gpipe_fast.trace.symbolic import Instance, Template, equal
from gpipe_fast.trace.symbols import CannotExpressError, SymbolicMode
from gpipe_fast.trace.traceability import Untraceable

# The number of traces that a template must reproduce.
_NUM_SAMPLES = 2
# The maximum number of symbolic traces for stages that differ only in sizes.
_MAX_TEMPLATE_ATTEMPTS = 3
# The maximum number of kinds of equal layers in a symbolic trace whose graphs are kept meanwhile.
_MAX_PARTS = 128


@dataclass
class ShapeFamily:
    """A stage for inputs that differ only in sizes.

    Attributes:
        samples: the first two traces with fixed sizes: what they are for, and the graphs.
        template: a symbolic trace for all sizes; None if there is none yet.
        num_attempts: the number of attempts to make a template, each of which is one symbolic trace.
    """

    samples: list[tuple[BoundarySpec, GradientLayouts, JointGraph]] = field(default_factory=list)
    template: Template | None = None
    num_attempts: int = 0

    def add_sample(self, inputs: BoundarySpec, gradient_layouts: GradientLayouts, joint: JointGraph) -> None:
        """Keeps a trace as a sample, if it is one of the first two."""
        if len(self.samples) < _NUM_SAMPLES:
            self.samples.append((inputs, gradient_layouts, joint))

    def num_sizes_to_trace(self) -> int | None:
        """Returns how many new sizes will be traced, until a template serves all; None for all."""
        if self.template is not None:
            return 0
        if self.num_attempts or switches.is_disabled("templates"):
            return None  # an attempt has failed, and the next ones probably will
        return _NUM_SAMPLES - len(self.samples) + 1  # the last trace has symbols for sizes

    def graphs(self) -> list[JointGraph]:
        """Returns the graphs that the family keeps."""
        return [joint for *_, joint in self.samples] + ([self.template.joint] if self.template else [])

    def instantiate(
        self, stage: Stage, inputs: BoundarySpec, gradient_layouts: GradientLayouts
    ) -> Instance | None:
        """Returns the template at these sizes, or None.

        The template is made here, by a symbolic trace, once two sizes have been traced.
        """
        if switches.is_disabled("templates"):
            return None
        if self.template is not None:
            instance = _at(self.template, inputs, gradient_layouts)
            if instance is not None:
                return instance
        every = (*(sample for sample, *_ in self.samples), inputs)
        varying = _varying_dims([[spec.shape for spec in each.tensors] for each in every])
        sizes = [n for s, dims in zip(inputs.tensors, varying, strict=True) for n in compress(s.shape, dims)]
        # PyTorch specializes symbolic traces on sizes of 0 and 1.
        if (
            len(self.samples) < _NUM_SAMPLES
            or self.num_attempts == _MAX_TEMPLATE_ATTEMPTS
            or min(sizes, default=0) < 2
        ):
            return None
        progress.step("tracing", stage.first_layer, len(stage.layers))
        log_graph(stage, "traced with symbols for sizes, as a template")
        mode = SymbolicMode(inputs.examples(), varying)
        fakes = FakeInputs(mode, mode.inputs, inputs.structure, inputs.skips)
        try:
            joint = trace_stage(stage, fakes, gradient_layouts, PartGraphs(_MAX_PARTS))
        except Untraceable:
            joint = None
        self.num_attempts += 1
        symbols = mode.symbols()
        if symbols is None or joint is None:
            return None
        template = Template(joint, symbols)
        instance = _at(template, inputs, gradient_layouts)
        if instance is None or not _reproduces(template, self.samples):
            return None
        self.template = template
        return instance


def family_key(inputs: BoundarySpec, gradient_layouts: GradientLayouts) -> Hashable:
    """Returns everything about the inputs and their gradients except sizes."""
    return (
        inputs.structure,
        inputs.skips,
        tuple((len(s.shape), s.dtype, s.device, s.requires_grad, s.bits) for s in inputs.tensors),
        tuple((i, layout and (dim_order(layout.strides), layout.bits)) for i, layout in gradient_layouts),
    )


def _varying_dims(seen: Sequence[Sequence[Sequence[int]]]) -> list[list[bool]]:
    """Returns, for each tensor, which dimensions differ between calls, given the shapes in each call."""
    return [[len(set(sizes)) > 1 for sizes in zip(*each, strict=True)] for each in zip(*seen, strict=True)]


def _at(template: Template, inputs: BoundarySpec, gradient_layouts: GradientLayouts) -> Instance | None:
    tensors = inputs.tensors
    return template.at([s.shape for s in tensors], [s.strides for s in tensors], gradient_layouts)


def _reproduces(
    template: Template, samples: Sequence[tuple[BoundarySpec, GradientLayouts, JointGraph]]
) -> bool:
    """Returns whether a template reproduces the sample traces; at least one must be within its range."""
    again = [(joint, _at(template, inputs, layouts)) for inputs, layouts, joint in samples]
    try:
        known = [equal(joint, instance.joint) for joint, instance in again if instance is not None]
    except CannotExpressError:
        return False
    return bool(known) and all(known)

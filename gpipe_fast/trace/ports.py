"""The ports of a traced stage with the metadata of their tensors: what others need to know of its graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gpipe_fast.trace.gradient_layouts import ArrivingLayouts, GradientLayout, GradientLayouts
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole, JointGraph
from gpipe_fast.trace.tensor_metadata import AnyTensor


class PortTensor(NamedTuple):
    """A port and its tensor's metadata; None for a port of which only the role and the index are needed."""

    port: GraphPort
    tensor: AnyTensor | None


@dataclass(frozen=True)
class TracedPorts:
    """The ports of a joint graph.

    Attributes:
        joint: the graph; the template's, if they are those of an instance.
        inputs: every placeholder, in graph order.
        outputs: forward results, new values of written buffers, gradients.
    """

    joint: JointGraph
    inputs: tuple[PortTensor, ...]
    outputs: tuple[PortTensor, ...]

    @classmethod
    def of_graph(cls, joint: JointGraph) -> TracedPorts:
        """Returns the ports of a joint graph."""
        inputs, outputs = (
            tuple(PortTensor(n.port, n.node.meta.get("val")) for n in nodes)
            for nodes in (joint.inputs, joint.outputs)
        )
        return cls(joint, inputs, outputs)

    @property
    def draws(self) -> bool:
        """Whether any operator draws random numbers."""
        return any(n.port.role is GraphRole.KEY and bool(n.node.users) for n in self.joint.inputs)

    def of(self, role: GraphRole) -> dict[int, AnyTensor]:
        """Returns the results with this role by index, or the placeholders if no result has it."""
        for ports in (self.outputs, self.inputs):
            found = {port.index: tensor for port, tensor in ports if port.role is role}
            if found:
                return {index: tensor for index, tensor in found.items() if tensor is not None}
        return {}

    def input_gradient_layouts(self) -> ArrivingLayouts:
        """Returns the layouts of the gradients of the inputs, by input."""
        return {i: GradientLayout.of(tensor) for i, tensor in self.of(GraphRole.INPUT_GRADIENT).items()}

    def gradient_layouts(self, gradients: ArrivingLayouts) -> GradientLayouts:
        """Returns the outputs whose gradients differ in layout from the output, or do not arrive.

        Args:
            gradients: the layouts of the gradients that arrive, by output.
        """
        # Strides of size-one dimensions are compared, too: they distinguish channels_last from contiguous.
        return tuple(
            (index, gradients.get(index))
            for index, tangent in self.of(GraphRole.TANGENT).items()
            if gradients.get(index) != GradientLayout.of(tangent)
        )

    def differentiable_outputs(self) -> frozenset[int]:
        """Returns the indices of the outputs that take a gradient."""
        return frozenset(port.index for port, _ in self.inputs if port.role is GraphRole.TANGENT)

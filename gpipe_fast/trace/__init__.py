"""Traces a stage to a graph.

The input is the layers of a stage and a description of the stage's input tensors; the result is a joint
forward-and-backward ATen graph (`JointGraph`), or the reason why the stage cannot be traced faithfully
(`Untraceable`).
"""

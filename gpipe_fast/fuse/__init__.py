"""Replaces nodes of a stage's graphs by launches of fused Triton kernels, and compiles the kernels."""

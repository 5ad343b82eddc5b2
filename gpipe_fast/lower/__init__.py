"""Lowering: turns a stage's joint graph into programs.

The input is a joint graph and the fraction of activations to save. The output is `Program`s: lists of
operator calls, memory offsets and gradient accumulations that C++ runs.
"""

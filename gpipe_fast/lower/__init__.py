"""A graph to programs.

A joint graph and the share of activations to keep come in; `Program`s, the lists of operators, memory
offsets and accumulations that C++ runs, go out. It imports `trace` and the extension; `runtime` imports it.
"""

"""A graph to programs.

A stage's joint graph and the share of activations to save come in; `Program`s go out, which are the lists of
operators, memory offsets and accumulations that C++ runs. The package imports `trace` and the extension; only
`runtime` imports it.
"""

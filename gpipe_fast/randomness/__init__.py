"""Keyed random draws: a draw depends on its place in the model, never on when or where it runs.

PyTorch's random operators come in; operators that draw from a key go out, for eager execution and for
tracing. It imports the extension, which has the operators; `trace`, `runtime` and the user's plain loop use
it.
"""

"""Keyed random draws: a draw depends on its place in the model, never on when or where it runs.

PyTorch's random operators come in; operators that draw by a key go out, for eager execution and for tracing.
Of gpipe_fast the package imports only the extension, which implements these operators. `trace`, `runtime`,
`gpipe` and `inspect` import it, and users get `keyed_rng` from it for a plain loop.
"""

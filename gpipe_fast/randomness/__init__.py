"""Keyed random draws: a draw depends on its position in the model, never on when or where it runs.

The package replaces PyTorch's random operators with operators that draw by a key, in eager mode and in
traces. It imports the extension, which implements these operators, and the titles of layers from `layers`.
`trace`, `runtime`, `gpipe` and `inspect` import it, and users call its `keyed_rng` in plain loops.
"""

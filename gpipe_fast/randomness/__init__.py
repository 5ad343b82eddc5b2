"""Keyed random draws: a draw depends on its position in the model, never on when or where it runs.

The package replaces PyTorch's random operators with operators that draw by a key, in eager mode and in
traces. Users call its `keyed_rng` in plain loops.
"""

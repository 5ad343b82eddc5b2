"""What a layer may do besides computing: skip tensors, keep statistics, nest values, ask for its phase.

The user's layers and their values come in; a description of their skips, statistics and nesting goes out.
It imports nothing of gpipe_fast; every other package may import it.
"""

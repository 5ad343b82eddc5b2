"""Plans: the segments and the schedule that one call of the module runs.

The input is the user's stages and the signature of a call; the output is a `Plan`, which the C++ pipeline
runs without Python. A plan is made once per signature, and again after a change of the module. The package
imports the packages that a plan is made with (`schedule`, `layers`, `randomness`, `trace`, `lower`) and the
extension; only `gpipe`, `stages`, `inspect` and the public `recording` import this package.
"""

"""A call to the plan that runs it.

The user's stages and the signature of a call come in; a `Plan` goes out, which the C++ pipeline runs without
Python. It is made once per signature, and again after a change. The package imports what a plan is made of
(`schedule`, `layers`, `randomness`, `trace`, `lower`) and the extension; only `gpipe`, `stages`,
`inspect` and the public `recording` import it.
"""

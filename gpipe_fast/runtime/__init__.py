"""A call to the plan that runs it.

The user's stages and the signature of a call come in; a `Plan`, which the C++ pipeline runs without Python,
goes out, made once per signature and again after a change. It imports every package that a plan is made of
(`schedule`, `layers`, `randomness`, `trace`, `lower`); only `gpipe` and `inspect` import it.
"""

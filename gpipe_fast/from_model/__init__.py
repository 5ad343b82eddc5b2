"""Pipelines of modules that are no `Sequential`.

In: the user's module, and the arguments of a call. Out: the same module, whose forward runs its blocks as a
pipeline.
"""

"""Compatibility with checkpoints of other libraries.

Its input is a state dict that torchgpipe saved; its output is one with the keys of the plain Sequential.
"""

"""Checkpoints of other libraries.

A state dict that torchgpipe saved comes in; one with the keys of the plain Sequential goes out. The package
imports nothing of gpipe_fast, and only `container` imports it.
"""

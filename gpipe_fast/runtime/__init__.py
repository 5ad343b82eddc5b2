"""Runners and plans: what runs the calls of a model's layers, and the segments and the schedule of a call.

The input is the user's layers and settings, and a call; the output is a `Plan`, which the C++ pipeline runs
without Python. A plan is made once per signature, and again after a change of the module.
`gpipe_fast/runtime/runner.py` shows the path of a call.
"""

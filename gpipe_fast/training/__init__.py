"""Whole training steps: the loss in the last stage, and forwards and backwards in any order.

In: the layers of a pipeline, and a loss. Out: the loss of a mini-batch, with gradients in ``.grad``.
"""

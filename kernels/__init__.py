"""Triton kernels, imported as `gpipe_fast.kernels`; they import torch and triton alone."""

from gpipe_fast.kernels.activations import bias_activation, bias_activation_backward

__all__ = ["bias_activation", "bias_activation_backward"]

"""Triton kernels, imported as `gpipe_fast.kernels`; they import torch and triton alone."""

from gpipe_fast.kernels.activations import bias_activation, bias_activation_backward
from gpipe_fast.kernels.dropout import dropout_add

__all__ = ["bias_activation", "bias_activation_backward", "dropout_add"]

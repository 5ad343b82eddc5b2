"""Triton kernels, imported as `gpipe_fast.kernels`; they import torch and triton alone."""

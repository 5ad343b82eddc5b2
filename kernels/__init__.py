"""Triton kernels, imported as `gpipe_fast.kernels`. They depend only on torch and triton."""

from gpipe_fast.kernels.activations import bias_activation, bias_activation_backward
from gpipe_fast.kernels.cross_entropy import cross_entropy
from gpipe_fast.kernels.dropout import dropout_add
from gpipe_fast.kernels.gated import gated_activation, gated_activation_backward
from gpipe_fast.kernels.linear_cross_entropy import linear_cross_entropy
from gpipe_fast.kernels.multi_tensor import accumulate_, accumulate_and_check_, unscale_
from gpipe_fast.kernels.norm_functions import layer_norm, layer_norm_backward, rms_norm, rms_norm_backward
from gpipe_fast.kernels.philox import Draw
from gpipe_fast.kernels.rotary import rotary, rotary_, rotary_backward_, rotary_tables

__all__ = [
    "Draw",
    "accumulate_",
    "accumulate_and_check_",
    "bias_activation",
    "bias_activation_backward",
    "cross_entropy",
    "dropout_add",
    "gated_activation",
    "gated_activation_backward",
    "layer_norm",
    "layer_norm_backward",
    "linear_cross_entropy",
    "rms_norm",
    "rms_norm_backward",
    "rotary",
    "rotary_",
    "rotary_backward_",
    "rotary_tables",
    "unscale_",
]

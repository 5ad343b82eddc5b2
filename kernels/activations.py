"""Activations and their derivatives in fp32, for the kernels of regions.

Phi and phi are the cumulative distribution and the density of the standard normal distribution, s is the
logistic function::

    silu       x s(x)      s(x) (1 + x (1 - s(x)))
    gelu       x Phi(x)    Phi(x) + x phi(x)                                     (arXiv 1606.08415)
    gelu_tanh  x s(2 u)    s(2 u) + 2 x s(2 u) (1 - s(2 u)) u',  u = sqrt(2 / pi) (x + 0.044715 x^3)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gelu_tanh_argument(x):
    return 1.5957691216057308 * (x + 0.044715 * x * x * x)


@triton.jit
def hyperbolic_tangent(x):
    """Computes tanh(x) with an error of at most two units in the last place.

    Near 0, where 1 - 2 / (exp(2 x) + 1) cancels, by the polynomial of Cephes' tanhf (S. Moshier, 1992).
    """
    square = x * x
    series = 2.06390887954e-2 - 5.70498872745e-3 * square
    series = 1.33314422036e-1 + (series * square - 5.37397155531e-2) * square
    near = x + x * square * (series * square - 3.33332819422e-1)
    far = 1.0 - tl.div_rn(2.0, tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Computes act(x). The activation is 'silu', 'gelu' or 'gelu_tanh'."""
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        y = x * tl.sigmoid(_gelu_tanh_argument(x))
    return y


@triton.jit
def activation_derivative(x, ACTIVATION: tl.constexpr):
    """Computes act'(x). 1 - s(v) is computed as s(-v), which does not cancel where s(v) is near 1."""
    if ACTIVATION == "silu":
        y = tl.sigmoid(x) * (1.0 + x * tl.sigmoid(-x))
    elif ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        y = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
    else:
        v = _gelu_tanh_argument(x)
        y = tl.sigmoid(v) * (1.0 + x * tl.sigmoid(-v) * 1.5957691216057308 * (1.0 + 0.134145 * x * x))
    return y

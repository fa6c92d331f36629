"""Sigmoid and its products, in float32, on device scalars."""

import cutlass.cute as cute
from cutlass import Float32

LOG2_E = 1.4426950408889634


@cute.jit
def sigmoid(x: Float32) -> Float32:
    """1 / (1 + exp(-x)) to about 2^-22 relative; 0 and 1 at the ends, never NaN for a finite x.

    exp2 and reciprocal are the approximate instructions. tanh.approx would be one instruction
    instead of two, but its absolute error of 2^-11 is a large relative one where sigmoid is small.
    """
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -LOG2_E, fastmath=True))

"""Random bits for dropout inside Triton kernels, as a hash of position and seed.

The backward pass recomputes the forward pass's mask from the seed, so no mask is stored. A number takes one
multiplication, compared with twenty for Philox, which would dominate the time of kernels bound by memory or matmuls.
Rows are hashed together with the seed, with the constants of Chris Wellons's hash prospector (lowbias32). Columns do
not depend on the seed and are only spread over 32 bits.
"""

import triton
import triton.language as tl

__all__ = ["hash_bits", "mix_bits", "spread_bits"]


@triton.jit
def hash_bits(x):
    """Hash uint32 to uint32; every bit of the result depends on every bit of the input."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def spread_bits(columns):
    """Spread column indices over uint32. Without the shift, dropout of columns at a fixed distance would correlate."""
    x = (columns.to(tl.uint32) + 1) * 0x9E3779B9
    return x ^ (x >> 15)


@triton.jit
def mix_bits(rows, columns):
    """Return one uint32 for each pair of a hashed row and a spread column; use its high bits.

    The row is both multiplier and addend, because plain products are poor random numbers in even columns. A test checks
    the independence of pairs of rows, pairs of columns, columns at a fixed distance and quadruples of a mask.
    """
    return (rows | 1) * (columns ^ (rows >> 7))

"""Random bits for dropout inside Triton kernels: a hash of the position and a seed, so that the backward pass draws
the forward pass's mask again and none is stored.

One multiplication a number, where Philox takes twenty: in kernels that are bound by memory or by their matrix
products, the random numbers would otherwise be what takes the time. Rows are hashed with the seed first, by the
constants of Chris Wellons's hash prospector (lowbias32); columns, which no seed is in, are only
spread over 32 bits.
"""

import triton
import triton.language as tl

__all__ = ["hash_bits", "mix_bits", "spread_bits"]


@triton.jit
def hash_bits(x):
    """uint32 → uint32, every bit of the one in every bit of the other."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def spread_bits(columns):
    """Numbers of columns → uint32. Without the shift, columns at one distance would be dropped together too often."""
    x = (columns.to(tl.uint32) + 1) * 0x9E3779B9
    return x ^ (x >> 15)


@triton.jit
def mix_bits(rows, columns):
    """One uint32 for each pair of a hashed row and a spread column, with good high bits.

    The row is multiplier and addend at once: of products alone, an even column would be a poor generator. Pairs of
    rows, pairs of columns, columns at one distance and quadruples of a mask are as independent as torch's, by a test.
    """
    return (rows | 1) * (columns ^ (rows >> 7))

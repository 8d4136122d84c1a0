"""Random bits for dropout inside Triton kernels: a hash of the position and a seed, so that the backward pass draws
the forward pass's mask again and none is stored.

Two multiplications a number, where Philox takes twenty: in kernels that are bound by memory or by their matrix
products, the random numbers would otherwise be what takes the time. The mixing constants are those of Chris
Wellons's hash prospector (lowbias32).
"""

import triton
import triton.language as tl

__all__ = ["hash_bits", "mix_bits"]


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
def mix_bits(rows, columns):
    """31 random bits, in an int32, for each pair of a hashed row and a hashed column."""
    x = rows ^ columns
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return (x >> 1).to(tl.int32)

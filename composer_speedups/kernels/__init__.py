"""Triton kernels and their autograd functions; they need torch alone."""

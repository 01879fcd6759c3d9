"""Triton kernels, one file each: the mathematics, the kernel, the op, the plain reference."""

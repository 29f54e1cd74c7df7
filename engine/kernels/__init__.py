"""Triton kernels. They import only torch, triton and each other."""

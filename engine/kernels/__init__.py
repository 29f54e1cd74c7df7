"""Triton kernels. They import torch, triton and each other, nothing above them."""

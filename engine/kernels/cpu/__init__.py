"""Kernels for steps of few tokens on a CPU, compiled by llvmlite when a model is loaded for the first time."""

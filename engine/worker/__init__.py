"""The device side of a step: inputs, forward pass, sampling, CUDA graphs."""

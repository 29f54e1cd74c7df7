"""Runner, sampler, paths of a step, tensor parallelism."""

"""Steps as CUDA graphs, with fused kernels: their launch takes less time than the launch of each kernel."""

"""Stage 3, allocate: who owns which block (allocator), which prefixes are shared (radix), and the tensors (pool)."""

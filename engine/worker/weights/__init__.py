"""The weights of a decoder: their kind, the memory that they need, how they are read and kept."""

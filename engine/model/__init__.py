"""Stage 4, the forward pass: one decoder for every architecture, its weights and its operations."""

"""Stage 4, the forward pass: one decoder for every dense architecture, its weights and its arithmetic."""

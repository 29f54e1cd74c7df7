"""Templates, tokenizers, grammars, detokenizing."""

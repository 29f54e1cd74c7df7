"""What happened: steps, requests, tokens, events and rates, folded from records in memory of fixed size."""

"""Applications under test: a source in this process, a pilot, a pseudo-terminal, pictures."""

"""Scheduler, allocator, radix tree, commit, and their decisions."""

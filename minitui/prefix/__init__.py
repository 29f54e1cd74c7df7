"""The prefix doctor: why requests did not find their beginning in the cache, and whose fault that is."""

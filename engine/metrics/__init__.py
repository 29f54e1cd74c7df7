"""The metrics of an engine under their names in vLLM, computed from its records: a Prometheus page, or values."""

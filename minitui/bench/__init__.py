"""`minitui bench`: speed as a share of this machine's limits, both measured in the same run."""

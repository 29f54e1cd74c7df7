"""`minitui bench`: speed, and what share of this machine's own limits it is, measured in the same run."""

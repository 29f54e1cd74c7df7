"""`minitui bench`: measures this machine's limits and, in the same run, speeds as shares of these limits."""

"""The commands of the command line: one module for each command, or for several related commands."""

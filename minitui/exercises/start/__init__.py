"""The files with which the exercises begin: `minitui exercise NAME` writes a copy."""

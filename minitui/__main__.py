"""`python -m minitui` is `minitui`."""

from minitui.cli import main

main()

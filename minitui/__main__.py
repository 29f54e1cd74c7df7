"""`python -m minitui` runs the command `minitui`."""

from minitui.cli.main import main

main()

"""`python -m minitui` is `minitui`."""

from minitui.cli.main import main

main()

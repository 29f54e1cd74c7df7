"""The command `minitui`, and `python -m minitui`."""

import os
import sys

from engine.process.startup import fewer_collections
from minitui.cli import early


def main() -> None:
    """Runs minitui; the entry point. Starts the engine's process before the command line is imported."""
    _open_closed_streams()
    fewer_collections()  # of garbage: a tenth of the time of the imports
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the import of numpy would start a thread for each core
    early.begin(sys.argv[1:])
    from minitui.cli.main import main as run

    run()


def _open_closed_streams() -> None:
    """Opens /dev/null for every closed standard stream (`>&-`). Python sets closed streams to None."""
    # This order gives each stream its own descriptor (0, 1, 2): `os.open` returns the lowest free descriptor.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


if __name__ == "__main__":
    main()

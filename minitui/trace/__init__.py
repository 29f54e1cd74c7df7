"""Trace files: their format, how they are read, checked and written, and the bundled recordings."""

from minitui.trace import foreign as foreign  # the kinds of records that only other servers write are known, too

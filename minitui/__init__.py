"""minitui: the terminal application that shows an inference engine at work. The engine is the package `engine`."""

__version__ = "0.1.0"

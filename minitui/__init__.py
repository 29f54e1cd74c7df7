"""minitui: the terminal application that shows how an inference engine works. The engine is the package `engine`."""

__version__ = "0.1.0"

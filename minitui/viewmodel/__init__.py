"""The data that the panels show, folded from the engine's records. Does not import Textual."""

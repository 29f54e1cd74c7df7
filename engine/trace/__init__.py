"""Records of the engine's decisions, and the engine's state computed from them."""

from engine.trace import kinds as kinds  # every kind of record is known before a record is read

"""Typed access to the fields of a checkpoint's JSON files. Every error names the file and the field."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError

INT32_MAX = (1 << 31) - 1  # sizes and ids become int32
SHOWN_CHARACTERS = 80
LARGEST_NUMBER = 1e30  # with larger numbers, results in float32 might not be finite
LISTED_AT_MOST = 8


class Fields:
    """One JSON object of a file; null counts as absent."""

    def __init__(self, path: Path, raw: dict[str, Any], where: str = "") -> None:
        """`where`: the place of the object in the file, for errors, such as " in its rope parameters"."""
        self.path = path
        self.raw = raw
        self._where = where

    def error(self, fault: str) -> CheckpointError:
        """Returns the error for this file; `fault` continues its name, as in "has no layers: …"."""
        return CheckpointError(f"{self.path} {fault}")

    def refuse(self, key: str, must: str) -> CheckpointError:
        """Returns the error for a field with a wrong value."""
        return self.error(f"has {key} = {shown(self.raw.get(key))}{self._where}: it must be {must}")

    def count(self, key: str, default: int | None = None, least: int = 1, most: int = INT32_MAX) -> int:
        """Returns a whole number. Raises CheckpointError if there is neither a value nor a default."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.refuse(key, f"a whole number {f'above {least - 1}' if least else 'of 0 or more'}")
        if value > most:
            raise self.refuse(key, f"at most {most:,}")
        return value

    def number(
        self, key: str, default: float | None = None, least: float = 0.0, open_low: bool = False,
        most: float = LARGEST_NUMBER,
    ) -> float:
        """Returns a finite number from `least` to `most`. With `open_low`, `least` itself is refused."""
        value = self._value(key, default)
        try:
            fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        except OverflowError:  # an integer too large for a float
            fits = False
        if not fits or value < least or (open_low and value == least):
            raise self.refuse(key, f"a finite number {'above' if open_low else 'of at least'} {least:g}")
        if value > most:
            raise self.refuse(key, f"at most {most:,g}")
        return float(value)

    def optional_number(self, key: str, open_low: bool = False, most: float = LARGEST_NUMBER) -> float | None:
        """Like `number`, but return None if the field is absent."""
        return None if self.raw.get(key) is None else self.number(key, open_low=open_low, most=most)

    def flag(self, key: str, default: bool = False) -> bool:
        """Returns true or false; `default` if the field is absent."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Returns the ids of a field (one id or a list), in order and without duplicates; () if it is absent."""
        value = self.raw.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= INT32_MAX for i in ids):
            raise self.refuse(key, f"a token id (a whole number from 0 to {INT32_MAX:,}) or a list of token ids")
        return tuple(dict.fromkeys(ids))

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"has no field {key!r}{self._where}: add it, or download the file again")
        return value


def shown(value: Any) -> str:
    """Returns the value of a field as one short line for an error message."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "a very long number"
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def listed(names: list[str], most: int = LISTED_AT_MOST) -> str:
    """Returns names as text for an error message: the first `most` names, and the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")

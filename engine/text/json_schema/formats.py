"""Patterns for the values of `format`, and patterns that llguidance needs in another spelling."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
MONTH_AND_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
DATE = f"(?:{YEAR}-{MONTH_AND_DAY}|{LEAP_YEAR}-02-29)"
CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{CLOCK}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{CLOCK})"
NUMBER = "[0-9]{1,5}"  # in a duration; longer durations do not fit into Python's timedelta
CLOCK_PARTS = f"T(?:{NUMBER}H(?:{NUMBER}M)?(?:{NUMBER}S)?|{NUMBER}M(?:{NUMBER}S)?|{NUMBER}S)"
DATE_PARTS = f"(?:{NUMBER}Y(?:{NUMBER}M(?:{NUMBER}D)?)?|{NUMBER}M(?:{NUMBER}D)?|{NUMBER}D)"
UUID = "[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{}[0-9a-fA-F]{{3}}-[89abAB][0-9a-fA-F]{{3}}-[0-9a-fA-F]{{12}}"
BASE64 = "(?:[{0}]{{4}})*(?:[{0}]{{2}}==|[{0}]{{3}}=)?"

# llguidance's own patterns accept days and seconds that do not exist, for example February 29 in every year.
PATTERNS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "duration": f"P(?:{DATE_PARTS}(?:{CLOCK_PARTS})?|{CLOCK_PARTS}|{NUMBER}W)",
    "base64": BASE64.format("A-Za-z0-9+/"),
    "base64url": BASE64.format("A-Za-z0-9_-"),
    **{f"uuid{version}": UUID.format(version) for version in range(1, 9)},
}
# format -> formats that llguidance has: the string must follow one of them. Networks and interfaces are
# written as addresses, which are valid networks and interfaces too.
OTHERS = {
    **{name: (name,) for name in ("email", "hostname", "ipv4", "ipv6", "uuid", "uri")},
    **{f"ipv{n}{kind}": (f"ipv{n}",) for n in (4, 6) for kind in ("network", "interface")},
    **{f"ipvany{kind}": ("ipv4", "ipv6") for kind in ("address", "network", "interface")},
}
# pydantic's pattern for Decimal begins with a look-ahead, "not only these characters". llguidance has no look-ahead.
NOT_ONLY = re.compile(r"\^\(\?!\^(\[[^\]\\^]+\])\*\$\)(?P<rest>.*)", re.DOTALL)


def of_format(name: Any) -> list[dict[str, Any]]:
    """Returns schemas for a string of this format. Unknown formats are annotations, as in draft 2020-12."""
    if not isinstance(name, str):
        return []
    if name in PATTERNS:
        return [{"pattern": f"^(?:{PATTERNS[name]})$"}]
    options = [{"format": other} for other in OTHERS.get(name, ())]
    return options if len(options) < 2 else [{"anyOf": options}]


def of_pattern(pattern: Any) -> list[dict[str, Any]]:
    """Returns schemas that together mean the same as the pattern."""
    found = NOT_ONLY.fullmatch(pattern) if isinstance(pattern, str) else None
    if found is None:
        return [{"pattern": pattern}]
    return [{"pattern": "^" + found["rest"]}, {"pattern": f"[^{found[1][1:-1]}]"}]


def none_of(texts: Iterable[str]) -> str:
    """Returns a pattern, without anchors, of every text except these."""
    rest: dict[str, list[str]] = {}  # first letter -> the texts that begin with the letter, without the letter
    for text in texts:
        rest.setdefault(text[:1], []).append(text[1:])
    options = [] if rest.pop("", None) else [""]
    options.append(rf"[^{''.join(map(_escaped, rest))}][\s\S]*" if rest else r"[\s\S]+")
    options += [f"{_escaped(letter)}(?:{none_of(ends)})" for letter, ends in rest.items()]
    return "|".join(options)


def _escaped(letter: str) -> str:
    return letter if letter.isalnum() else f"\\x{{{ord(letter):X}}}"

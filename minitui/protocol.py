"""What clients and servers share: names of tokenizer files, which hosts are local, and how many ranks may exist."""

from __future__ import annotations

import ipaddress

MOST_RANKS = 64  # data parallel ranks of another engine, behind one address

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", "chat_template.jinja",
    "chat_template.json", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip


def is_loopback(host: str) -> bool:
    """Returns whether this name or address is a loopback address."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

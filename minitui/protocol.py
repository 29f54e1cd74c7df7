"""What both ends of a connection between minitui and a server must agree on."""

from __future__ import annotations

import ipaddress

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


def is_loopback(host: str) -> bool:
    """Does this name or address mean the machine itself?"""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

"""Anthropic's Messages API: requests become chat requests, and replies become content blocks.

    schema.py      validates requests, and translates them
    endpoints.py   the endpoints; write the message and its events
"""

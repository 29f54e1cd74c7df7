"""Anthropic's Messages API: requests become chat requests, and replies become content blocks.

    schema.py      validates requests, and translates them
    answer.py      writes the message and its events
    endpoints.py   the endpoints
"""

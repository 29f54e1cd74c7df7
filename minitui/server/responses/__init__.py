"""OpenAI's Responses API: requests become chat requests, and replies are stored for the next request.

    schema.py      validates requests, and translates them
    tools.py       translates tools to functions, and calls back
    store.py       keeps the last responses
    endpoints.py   the endpoints; write the response and its events
"""

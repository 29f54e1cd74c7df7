"""The HTTP server of one engine process: the APIs of OpenAI and Anthropic, /generate, metrics, telemetry and control.

    settings.py      the operator's choices: address, keys, limits
    connection.py    closes connections with slow request heads or bytes that are not HTTP
    access.py        checks before a request's body is parsed: host, origin, key, size
    bodies.py        inflates, bounds and validates bodies
    errors.py        converts every error to OpenAI's format
    service.py       owns the engine client: loading, restart, admission, drain
    strict.py        the base classes of requests; refuses unknown fields
    notices.py       tells callers what was ignored: the header X-Minitui-Warning
    schema.py        the fields that requests share; constraints.py: those that constrain a reply
    answer.py        answers one request, as a whole or as events
    sse.py           server-sent events
    openai/          OpenAI's APIs for chats and texts, with /generate and /tokenize
    responses/       OpenAI's Responses API
    messages/        Anthropic's Messages API
    items.py         translates these two APIs to chat requests, and chat replies to items
    telemetry/       /metrics, /health, and the records for minitui's own client
    application.py   combines the endpoints, and shows them; command.py runs the server

FastAPI and uvicorn belong to the extra "serve"; nothing outside this package imports them.
"""

"""The HTTP server of one engine process: the APIs of OpenAI and Anthropic, /generate, metrics, telemetry and control.

    settings.py      the operator's choices: address, keys, limits
    connection.py    closes connections with slow request heads or bytes that are not HTTP
    access.py        checks before a request's body is parsed: host, origin, key, size
    errors.py        converts every error to OpenAI's format
    service.py       owns the engine client: loading, restart, admission, drain
    broadcast.py     sends the engine's records to all watchers
    metrics.py       the values of /metrics; prometheus.py writes them as text; http_metrics.py: those of HTTP requests
    strict.py        the base classes of requests; unknown.py refuses unknown fields
    notices.py       tells callers what was ignored: the header X-Minitui-Warning
    schema.py        the fields that requests share; chat_schema.py, text_schema.py, constraints.py: the other fields
    reply_schema.py  the fields of answers
    prompts.py       encodes texts and conversations as token ids
    answer.py        answers one request, as a whole or as events
    sse.py           server-sent events
    chat.py completions.py tokenize.py health.py telemetry.py     the endpoints
    items.py         translates the next two APIs to chat requests, and chat replies to items
    responses/       OpenAI's Responses API
    messages/        Anthropic's Messages API
    application.py   combines the endpoints; command.py runs the server

FastAPI and uvicorn belong to the extra "serve"; nothing outside this package imports them.
"""

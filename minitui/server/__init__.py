"""The HTTP server over one engine process: plain and OpenAI's endpoints, Prometheus metrics, telemetry and control.

    settings.py      the operator's choices: address, keys, limits
    connection.py    connections before their first request: slow heads, bytes that are not HTTP
    access.py        checks before a request's body is parsed: key, origin, size
    errors.py        every error, in OpenAI's shape
    service.py       owns the engine client: loading, restart, admission, drain
    broadcast.py     passes the engine's records on to the watchers
    metrics.py       the values of /metrics; prometheus.py is their text format
    schema.py        the fields of requests and answers, validated
    prompts.py       texts and conversations to token ids
    answer.py        the answer to one request: its sequences, whole or as events
    sse.py           server-sent events
    chat.py completions.py tokenize.py health.py telemetry.py     the endpoints
    application.py   combines the endpoints; command.py runs them

FastAPI and uvicorn belong to the extra "serve"; nothing outside this package imports them.
"""

"""The HTTP server over one engine process: plain and OpenAI's endpoints, Prometheus metrics, telemetry and control.

    settings.py      what the operator chose: address, keys, limits
    connection.py    before there is a request: a head that does not come, what is no HTTP
    access.py        before a request is read: who asks, from where, how large
    failures.py      every refusal and error, in OpenAI's shape
    service.py       the engine client's owner: loading, restart, admission, drain, tokenising off the loop
    prompts.py       texts and conversations to ids
    replies.py       one HTTP request's sequences, gathered or streamed, cancelled when the caller is gone
    sse.py           server-sent events
    schema.py        what may be asked, validated by name
    chat.py completions.py text.py vitals.py telemetry.py     the endpoints
    application.py   puts them together; command.py runs it

FastAPI and uvicorn are the extra "serve"; nothing outside this package imports them.
"""

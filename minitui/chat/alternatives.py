"""What else could a token of a chat have been? A request for one token after the tokens before it gives the answer."""

from __future__ import annotations

import math

from engine.errors import EngineError
from engine.params import MAX_LOGPROBS, SamplingParams
from minitui.chat.conversation import Session
from minitui.chat.sessions import Chats


def known_tokens(chats: Chats, session: Session) -> list[int]:
    """Returns the token ids of the chat. Raises EngineError if they are unknown, or if they may still change."""
    if session.busy:
        raise EngineError("this chat is still being answered: wait for the end of the answer")
    if len(session.ids) < 2 or session.ids_model != chats.model:
        raise EngineError("the tokens of this chat are not known here: ask a question, then try again")
    return list(session.ids)


async def alternatives(chats: Chats, ids: list[int], at: int) -> list[tuple[int, float]]:
    """Returns (token, probability) of the likeliest tokens at position `at` of `ids`, the likeliest first. The
    probabilities are the model's own, before temperature and cuts. The engine computes them again in a request for one
    token; the tokens before it mostly come from the cache."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=MAX_LOGPROBS, ignore_eos=True)
    stream = chats.source.submit(ids[:at], params, group="tokens")
    found = [entry async for delta in stream for entry in delta.logprobs]
    if not found:
        raise EngineError("this server does not list the probabilities of tokens")
    return [(token, math.exp(logprob)) for token, logprob in found[0].top]

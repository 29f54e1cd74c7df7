"""The endpoints /v1/models, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from engine.errors import InvalidRequest
from minitui.server.bodies import Endpoints
from minitui.server.errors import ApiError
from minitui.server.openai.prompts import conversation, encode
from minitui.server.openai.reply_schema import ModelCard, ModelList, Text, Tokens
from minitui.server.openai.text_schema import DetokenizeRequest, TokenizeRequest
from minitui.server.service import Service


def router(service: Service) -> APIRouter:
    """Returns a router with these endpoints."""
    routes = Endpoints(service)

    def card(name: str) -> ModelCard:
        return ModelCard(id=name, created=service.began, owned_by="minitui", max_model_len=service.info.max_model_len)

    @routes.get("/v1/models", response_model=ModelList)
    async def models() -> ModelList:
        """Lists the names of the one model that this server serves."""
        return ModelList(data=[card(name) for name in service.names])

    @routes.get("/v1/models/{model:path}", response_model=ModelCard)
    async def model(model: str) -> ModelCard:
        """Describes the model with this name."""
        return card(service.check_model(model))

    @routes.post("/tokenize", response_model=Tokens)
    async def tokenize(body: TokenizeRequest) -> Any:
        """Returns the token ids of a text, or of a conversation after the chat template has been applied."""
        service.check_model(body.model)
        tokenizer = service.tokenizer
        if body.prompt is not None:
            ids = await service.in_thread(encode, tokenizer, body.prompt, body.add_special_tokens)
        else:
            ids = await service.in_thread(
                conversation, tokenizer, body.messages or [], None, body.add_generation_prompt, {}
            )
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": service.info.max_model_len})

    @routes.post("/detokenize", response_model=Text)
    async def detokenize(body: DetokenizeRequest) -> Text:
        """Returns the text of token ids, including control tokens."""
        service.check_model(body.model)
        size = service.info.vocab_size
        if max(body.tokens, default=0) >= size:
            raise ApiError(400, f"tokens has an id above {size - 1:,}, the largest token id of this model", "tokens")
        try:
            text = await service.in_thread(service.tokenizer.decode, body.tokens, False)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"tokens cannot be decoded: {error}", "tokens") from error
        return Text(prompt=text)

    return routes

"""Defines the fields of answers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class PromptDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class OpenAIResponse(BaseModel):
    """The fields in the answers of all OpenAI endpoints."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage


class Generated(BaseModel):
    text: str
    finish_reason: str
    usage: Usage


class Tokens(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class Text(BaseModel):
    prompt: str


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]

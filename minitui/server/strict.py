"""The base classes of request bodies: types are strict ("5" is not a number), and unknown fields are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ModelWrapValidatorHandler, model_validator

from minitui.server.unknown import check_unknown_fields

MAX_FIELDS = 100  # in one object; the largest valid request has about 75


def at_most(count: int) -> BeforeValidator:
    """Returns a validator that refuses an object with more entries than `count` before it checks their values."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"it has {len(value):,} entries; the limit is {count:,}")
        return value

    return BeforeValidator(check)


class Strict(BaseModel):
    """A part of a request body."""

    refuses_unknown: ClassVar[bool] = True
    ignored: ClassVar[frozenset[str]] = frozenset()  # fields that clients send, without effect here
    refused: ClassVar[Mapping[str, str]] = {}  # fields that would change the reply, but are not supported -> the reason
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _not_too_many(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"the object has {len(value):,} fields; the limit is {MAX_FIELDS:,}")
        return value


class Open(Strict):
    """A part of a request whose unknown fields are ignored.

    These are parts that clients send back as they got them from this or another server, with its additions.
    """

    refuses_unknown: ClassVar[bool] = False


class Body(Strict):
    """A whole request body. Unknown fields, in the body and in its parts, are refused."""

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        body = handler(value)
        check_unknown_fields(body, value)
        return body

"""What the forms of requests are made of: a part of a request, and how unions are told apart."""

from collections.abc import Callable
from typing import Annotated, Any

import pydantic
from pydantic import Discriminator, Field
from pydantic_core import PydanticCustomError

#: Marks a field that accepts only values without effect.
UNSUPPORTED = object()

#: The type of what asks for nothing, whatever it holds.
NotRead = Annotated[Any, Field(description="Not looked at.")]

#: How the tags of unions begin, to tell them from fields in the place of an error.
TAG = "#"


class RequestPart(pydantic.BaseModel):
    """A part of a request."""

    model_config = pydantic.ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )


def text_or_list(value: Any) -> str | None:
    if isinstance(value, list):
        return "#list"
    return "#text" if isinstance(value, str) else None


def one_of(kind: Callable[[Any], str | None], what: str) -> Discriminator:
    """Tells the members of a union apart; `what` is said of a value that is none of them."""
    return Discriminator(
        kind, custom_error_type="wrong_type", custom_error_message=f"Input should be {what}"
    )


def of_kind(what: str, *supported: str) -> pydantic.BeforeValidator:
    """Refuses objects of a type that OpenAI knows and this server does not.

    Args:
        what: they are, for the caller.
        supported: what their `type` may be. Without one, the object is left to its own fields.
    """

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in supported:
            raise PydanticCustomError(
                "unsupported",
                "{what} of type {kind} is not supported",
                {"what": what, "kind": kind[:64]},
            )
        return value

    return pydantic.BeforeValidator(check)

"""The keys of a configuration: one flat namespace from nested models.

Owns which keys a model has, and the flag and environment variable of each. Knows no values; callers
use `servicekit.config`.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any

import pydantic
import pydantic_core
from pydantic.fields import FieldInfo

ENVIRONMENT_PREFIX = "TANDEM"


class ConfigError(Exception):
    """An invalid configuration.

    Args:
        key: the wrong key as it was given: `--listen`, `TANDEM_SHOP_LISTEN`,
            `shop.yaml: listen`; "" if several keys contradict each other.
        message: the reason, with the offending value.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}" if key else message)
        self.key = key
        self.message = message


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One key of a configuration: one field of a model or of a model nested in it."""

    name: str
    """The field's name, and the YAML key."""
    path: tuple[str, ...]
    """The names of the nested models that hold the field, then its own."""
    flag: str
    variable: str
    description: str
    type: Any
    """The field's annotation."""
    default: Any
    """`pydantic_core.PydanticUndefined` if a value is required."""

    @property
    def is_optional(self) -> bool:
        """Whether the value may be None."""
        return type(None) in alternatives(self.type)

    @property
    def is_bool(self) -> bool:
        """Whether the flag is --x or --no-x."""
        return bool in alternatives(self.type)

    @property
    def is_list(self) -> bool:
        """Whether the value is comma-separated."""
        return any(
            (typing.get_origin(kind) or kind) in (list, tuple, set, frozenset)
            for kind in alternatives(self.type)
        )


def list_options(model: type[pydantic.BaseModel], *, service: str) -> list[Option]:
    """All keys of a configuration model, in order.

    Raises:
        AssertionError: two fields share a name, or one has a name, alias or type that cannot be
            configured.
    """
    options = list(_walk(model, (), pydantic_core.PydanticUndefined, service))
    first_by_name: dict[str, Option] = {}
    for option in options:
        where = f"{model.__name__}: {'.'.join(option.path)}"
        first = first_by_name.setdefault(option.name, option)
        assert first is option, f"{where} and {'.'.join(first.path)} would both be {option.flag}"
        assert option.name not in ("config", "help"), f"{where}: {option.flag} is taken"
        assert not option.name.startswith("no_"), f"{where}: --no-... switches bools off"
    return options


def variable_name(service: str, name: str) -> str:
    """The environment variable of a service's key."""
    return f"{ENVIRONMENT_PREFIX}_{service.replace('-', '_')}_{name}".upper()


def alternatives(annotation: object) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _walk(
    model: type[pydantic.BaseModel], path: tuple[str, ...], defaults: object, service: str
) -> Iterator[Option]:
    for name, field in model.model_fields.items():
        assert (field.alias or field.validation_alias) is None, (
            f"{model.__name__}.{name}: a field with an alias has no flag"
        )
        default = _default(field, name, defaults)
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
            yield from _walk(annotation, (*path, name), default, service)
            continue
        for kind in alternatives(annotation):
            kind = typing.get_origin(kind) or kind
            assert not (isinstance(kind, type) and issubclass(kind, pydantic.BaseModel | dict)), (
                f"{model.__name__}.{name}: {kind.__name__} has no form as a flag"
            )
        yield Option(
            name=name,
            path=(*path, name),
            flag="--" + name.replace("_", "-"),
            variable=variable_name(service, name),
            description=" ".join((field.description or "").split()),
            type=annotation,
            default=default,
        )


def _default(field: FieldInfo, name: str, defaults: object) -> object:
    # The instance that a parent defaults to wins over the nested model's own defaults, as in
    # `server: ServerOptions = ServerOptions(listen="127.0.0.1:50051")`.
    if isinstance(defaults, pydantic.BaseModel):
        return getattr(defaults, name)
    return field.get_default(call_default_factory=True, validated_data={})

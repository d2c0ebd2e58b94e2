"""Flags that several commands share: a dataclass of flags as one parameter of a command.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Size:
        width: Annotated[int, typer.Option(help="in metres")] = 1

    @with_flag_groups
    def command(name: str, *, size: Size) -> int: ...

Owns the translation only; typer reads the resulting function as if it named every flag itself.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def with_flag_groups(command: Callable[..., int]) -> Callable[..., int]:
    """Returns the command with each parameter that is a dataclass replaced by its fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {
        name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)
    }
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            parameters += _fields_as_parameters(groups[parameter.name])
        else:
            parameters.append(
                parameter.replace(
                    kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name]
                )
            )

    @functools.wraps(command)
    def flat(**values: Any) -> int:
        for name, group in groups.items():
            fields = [field.name for field in dataclasses.fields(group)]
            values[name] = group(**{field: values.pop(field) for field in fields})
        return command(**values)

    # typer reads both; the wrapped function's own would hide them.
    del flat.__wrapped__
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {each.name: each.annotation for each in parameters}
    return flat


def _fields_as_parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
    ]

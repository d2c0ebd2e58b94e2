"""Every exception that ends an RPC has a status."""

import drafter.errors
from drafter.errors import (
    ERROR_TABLE,
)


def test_every_error_of_the_module_has_a_status() -> None:
    errors = {
        value
        for value in vars(drafter.errors).values()
        if isinstance(value, type)
        and issubclass(value, Exception)
        and value.__module__ == drafter.errors.__name__
    }
    assert errors
    assert errors == set(ERROR_TABLE)

"""Every exception that ends an RPC has a status."""

import grpc
import pytest

import drafter.errors
from drafter.errors import (
    ERROR_TABLE,
    MalformedBatchError,
    NotServingError,
    UnsupportedFieldError,
)
from servicekit.errors import RequestError, find_code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MalformedBatchError("sequences", "too many"), grpc.StatusCode.INVALID_ARGUMENT),
        (UnsupportedFieldError("releases[0].keep", "no"), grpc.StatusCode.UNIMPLEMENTED),
        (NotServingError("not yet"), grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_errors_become_their_statuses(error: RequestError, code: grpc.StatusCode) -> None:
    assert find_code(error, ERROR_TABLE) is code


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

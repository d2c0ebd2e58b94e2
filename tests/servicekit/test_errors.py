"""Errors: from an exception to a status, and back out of a failed call."""

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from servicekit.errors import (
    MalformedRequestError,
    RequestError,
    code_number,
    field_violation,
    find_code,
    retry_after_ms,
    to_status,
)
from tests.servicekit.factories import InvalidValueError


class VeryInvalidValueError(InvalidValueError):
    pass


class OverloadedError(RequestError):
    pass


TABLE = {
    RequestError: grpc.StatusCode.FAILED_PRECONDITION,
    InvalidValueError: grpc.StatusCode.INVALID_ARGUMENT,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    KeyError: grpc.StatusCode.NOT_FOUND,
}


def failed_call(error: Exception) -> grpc.RpcError:
    """What a client would hold after the error went over the wire."""
    status = rpc_status.to_status(to_status(error, TABLE))
    return grpc.aio.AioRpcError(
        code=status.code,
        initial_metadata=grpc.aio.Metadata(),
        trailing_metadata=grpc.aio.Metadata(("x", "y"), *status.trailing_metadata),
        details=status.details,
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("x"), grpc.StatusCode.FAILED_PRECONDITION),
        (InvalidValueError("x"), grpc.StatusCode.INVALID_ARGUMENT),
        (VeryInvalidValueError("x"), grpc.StatusCode.INVALID_ARGUMENT),
        (OverloadedError("x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (MalformedRequestError("/a/B"), grpc.StatusCode.INVALID_ARGUMENT),
        (KeyError("x"), grpc.StatusCode.NOT_FOUND),
        (LookupError("x"), None),
        (ValueError("x"), None),
    ],
)
def test_the_nearest_class_in_the_table_gives_the_code(
    error: Exception, code: grpc.StatusCode | None
) -> None:
    assert find_code(error, TABLE) is code
    expected = code or grpc.StatusCode.INTERNAL
    assert to_status(error, TABLE).code == code_number(expected) == expected.value[0]


def test_field_and_retry_survive_the_wire() -> None:
    error = failed_call(
        InvalidValueError("top_p is 2", field="sampling.top_p", retry_after_ms=1500)
    )
    assert field_violation(error) == ("sampling.top_p", "top_p is 2")
    assert retry_after_ms(error) == 1500


def test_what_an_error_does_not_have_is_not_sent() -> None:
    status = to_status(InvalidValueError("no"), TABLE)
    assert status.message == "no"
    assert not status.details
    error = failed_call(InvalidValueError("no"))
    assert field_violation(error) is None
    assert retry_after_ms(error) is None
    zero = failed_call(OverloadedError("now", retry_after_ms=0))
    assert retry_after_ms(zero) == 0
    assert field_violation(zero) is None


def test_a_call_that_failed_without_details_has_none() -> None:
    for metadata in (None, grpc.aio.Metadata(), grpc.aio.Metadata(("grpc-status-details", "x"))):
        bare = grpc.aio.AioRpcError(
            code=grpc.StatusCode.UNAVAILABLE, trailing_metadata=metadata, details="gone"
        )
        assert field_violation(bare) is None
        assert retry_after_ms(bare) is None


def test_long_texts_are_cut_to_what_fits_into_headers() -> None:
    # The cut would be within a character.
    status = to_status(InvalidValueError("x" + "\u20ac" * 10_000, field="f" * 10_000), TABLE)
    assert len(status.message.encode()) <= 768
    assert status.message.endswith("\u20ac...")
    violation = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(violation)
    assert violation.field_violations[0].field == "f" * 253 + "..."
    plain = to_status(KeyError("x" * 10_000), {KeyError: grpc.StatusCode.NOT_FOUND})
    assert len(plain.message) == 768
    exact = "x" * 768
    assert to_status(InvalidValueError(exact), TABLE).message == exact

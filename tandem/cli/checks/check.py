"""One finding of `tandem doctor`."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Status(enum.StrEnum):
    """How good a finding is; a failure is what keeps Tandem from working."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was found, and what to do about it."""

    name: str
    status: Status
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name=name, status=Status.OK, found=found)


def warn(name: str, found: str, advice: str) -> Check:
    return Check(name=name, status=Status.WARN, found=found, advice=advice)


def fail(name: str, found: str, advice: str) -> Check:
    return Check(name=name, status=Status.FAIL, found=found, advice=advice)


def sampling_check(name: str, defaults: Mapping[str, float]) -> Check:
    """What requests over HTTP get that name no value."""
    values = ", ".join(f"{field} {value:g}" for field, value in defaults.items())
    return ok(name, f"over HTTP, where a request says nothing: {values}")

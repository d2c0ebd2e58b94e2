"""Which addresses a session may name: those of the operator's entries, and no other machine."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servicekit.address import parse_address
from tests.scripted_dns import ScriptedDns
from tests.volume import examples
from verifier.drafters.addresses import AdmittedDrafters

HOST = "drafter.tandem.svc"
ENTRY = f"{HOST}:50051"


@pytest.mark.parametrize(
    "address",
    [
        ENTRY,
        "drafter-0.drafter.tandem.svc:50051",
        "a.b_c.drafter.tandem.svc:50051",
        "127.0.0.1:50061",
        "[::1]:50062",
    ],
)
def test_an_entry_and_names_below_it_are_admitted(address: str) -> None:
    admitted = AdmittedDrafters([ENTRY, "127.0.0.1:50061", "[::1]:50062"])
    assert admitted.admit(address)
    assert admitted.may_connect(parse_address(address))


@pytest.mark.parametrize(
    "address",
    [
        "drafter.tandem.svc:50052",
        "drafter.tandem.svc:0",
        "evil-drafter.tandem.svc:50051",
        "tandem.svc:50051",
        "drafter.tandem.svc.evil.example:50051",
        "drafter.tandem.svc",
        ".drafter.tandem.svc:50051",
        "..drafter.tandem.svc:50051",
        "127.0.0.2:50061",
        "127.0.0.1:50052",
        "localhost:50051",
        # gRPC reads these as URIs, and would connect to what stands first.
        "evil.example#.drafter.tandem.svc:50051",
        "evil.example?.drafter.tandem.svc:50051",
        "evil.example/.drafter.tandem.svc:50051",
        "evil.example%2f.drafter.tandem.svc:50051",
        "evil.example,a.drafter.tandem.svc:50051",
        "evil.example\n.drafter.tandem.svc:50051",
        "evil.example\x00.drafter.tandem.svc:50051",
        "user@evil.example@.drafter.tandem.svc:50051",
        "dns:///drafter.tandem.svc:50051",
        "unix:/tmp/socket",
        "ipv4:127.0.0.1:50061",
        "http://drafter.tandem.svc:50051",
        "",
        ":",
        ":50051",
        "drafter.tandem.svc:",
        "drafter.tandem.svc:-1",
        "drafter.tandem.svc:99999",
        "drafter.tandem.svc:50051 ",
        " drafter.tandem.svc:50051",
        "[drafter.tandem.svc]:50051",
        "\N{CYRILLIC SMALL LETTER ES}.drafter.tandem.svc:50051",
    ],
)
def test_no_other_address_is(address: str) -> None:
    admitted = AdmittedDrafters([ENTRY, "127.0.0.1:50061"])
    assert not admitted.admit(address)


@given(text=st.text(max_size=20), suffix=st.sampled_from(["", ".localhost:1", "localhost:1", ":1"]))
@settings(max_examples=examples(400), deadline=None)
def test_whatever_is_admitted_is_a_host_at_or_below_an_entry(text: str, suffix: str) -> None:
    address = text + suffix
    if AdmittedDrafters(["localhost:1"]).admit(address):
        parsed = parse_address(address)
        labels = parsed.host.split(".")
        assert (labels[-1], parsed.port) == ("localhost", 1)
        assert all(
            label.isascii() and label.replace("-", "").replace("_", "").isalnum()
            for label in labels
            if label.strip("-_")
        )


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "a.localhost"])
def test_localhost_admits_this_machine(host: str) -> None:
    admitted = AdmittedDrafters(["localhost:50051"])
    assert admitted.may_connect(parse_address(f"{host}:50051"))
    assert not admitted.admit(f"{host}:50052")
    assert not admitted.admit("127.9.9.9:50051")


async def test_a_name_admits_the_ip_addresses_that_it_resolves_to() -> None:
    dns = ScriptedDns(**{HOST: ["10.0.0.1", "10.0.0.2"]})
    admitted = AdmittedDrafters([ENTRY, "no-such-host.invalid:50051"], resolve=dns)
    one, two, three, other_port = map(
        parse_address, ("10.0.0.1:50051", "10.0.0.2:50051", "10.0.0.3:50051", "10.0.0.1:50052")
    )
    # Each may become an address of the name; until then nothing connects to it.
    assert [admitted.admit(str(each)) for each in (one, two, three)] == [True] * 3
    assert not any(map(admitted.may_connect, (one, two, three)))
    await admitted.resolve()
    assert all(map(admitted.may_connect, (one, two)))
    assert not any(map(admitted.may_connect, (three, other_port)))
    assert not admitted.admit(str(other_port))
    assert (admitted.server_name(one), admitted.server_name(parse_address(ENTRY))) == (HOST, None)
    invalid = "no-such-host.invalid:50051"
    assert admitted.may_connect(parse_address(invalid)), "a name is admitted, resolved or not"


async def test_an_address_that_a_name_has_no_more_is_connected_no_more() -> None:
    dns = ScriptedDns(**{HOST: ["10.0.0.1", "10.0.0.2"]})
    admitted = AdmittedDrafters([ENTRY], resolve=dns)
    one, two = map(parse_address, ("10.0.0.1:50051", "10.0.0.2:50051"))
    await admitted.resolve()
    dns.answers[HOST] = ["10.0.0.2"]
    await admitted.resolve()
    assert [admitted.may_connect(each) for each in (one, two)] == [False, True]
    del dns.answers[HOST]
    await admitted.resolve()
    assert admitted.may_connect(two), "an outage of DNS changes nothing"


async def test_who_waits_for_an_address_has_its_name_resolved_at_once() -> None:
    dns = ScriptedDns(**{HOST: ["10.0.0.1"]})
    admitted = AdmittedDrafters([ENTRY], resolve_interval_s=3600.0, resolve=dns)
    running = asyncio.ensure_future(admitted.run())
    try:
        async with asyncio.timeout(60):
            await admitted.wait(parse_address("10.0.0.1:50051"))
            dns.answers[HOST] = ["10.0.0.1", "10.0.0.2"]
            await admitted.wait(parse_address("10.0.0.2:50051"))
        never = asyncio.ensure_future(admitted.wait(parse_address("10.0.0.3:50051")))
        await dns.asked_for(HOST, 3)
        assert not never.done()
        never.cancel()
    finally:
        running.cancel()


@pytest.mark.parametrize("entry", ["drafter", "unix:/x", "dns:///drafter:1", "drafter:70000"])
def test_an_entry_that_is_no_address_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|65535"):
        AdmittedDrafters([entry])

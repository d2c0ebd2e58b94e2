"""The page's files over HTTP: their headers, caching, and that there are no others."""

from pathlib import Path

import pytest

from tests.gateway.openai.clients import get
from tests.gateway.running_gateway import RunningGateway, StartGateway
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in

STATIC = Path(__file__).parents[3] / "gateway" / "page" / "static"
PATHS = ["/", *(f"/page/{file.name}" for file in STATIC.iterdir() if file.name != "index.html")]


@pytest.fixture
async def running(start_gateway: StartGateway, verifier: ScriptedVerifier) -> RunningGateway:
    return await start_gateway(verifiers=[verifier.address], http_listen="127.0.0.1:0")


async def test_every_file_forbids_scripts_frames_and_hosts_of_others(
    running: RunningGateway,
) -> None:
    for path in PATHS:
        answer = await get(running, path)
        assert answer.status == 200, path
        policy = dict(
            part.strip().split(" ", 1)
            for part in answer.headers["content-security-policy"].split(";")
        )
        assert policy.pop("default-src") == "'none'"
        assert policy.pop("frame-ancestors") == "'none'"
        assert policy.pop("require-trusted-types-for") == "'script'"
        assert set(policy.values()) == {"'self'", "'none'"}
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/index.html",
        "/page/../routes.py",
        "/page/..%2froutes.py",
        "/page/%2e%2e/routes.py",
        "/page//etc/passwd",
        "/page/main.js/",
        "/page/main.js%00",
        "/../../../../etc/passwd",
    ],
)
async def test_no_other_path_leads_to_a_file(running: RunningGateway, path: str) -> None:
    assert (await get(running, path)).status == 404


async def test_without_the_page_the_api_is_still_there(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(
        verifiers=[verifier.address], http_listen="127.0.0.1:0", page=False
    )
    for path in PATHS:
        assert (await get(running, path)).status == 404
    assert (await get(running, "/v1/models")).status == 200


async def test_a_known_file_is_not_sent_again(running: RunningGateway) -> None:
    first = await get(running, "/page/main.js")
    assert first.headers["cache-control"] == "no-cache"
    etag = first.headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}'):
        again = await get(running, "/page/main.js", if_none_match=known)
        assert (again.status, again.body) == (304, "")
        assert again.headers["etag"] == etag
    changed = await get(running, "/page/main.js", if_none_match='"other"')
    assert (changed.status, changed.body) == (200, first.body)

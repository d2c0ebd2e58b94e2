"""The first request of services that were just started, as processes, is drafted for."""

from benchmarks.services import running_stack
from tandem.client import GenerationRequest, TandemClient
from tests.integration.stack import MODEL

PROMPT = (
    "<|code|>def mean(values): return sum(values) / len(values)<|rename|>values<|to|>numbers<|out|>"
)


def test_the_first_request_has_drafts_accepted() -> None:
    with (
        running_stack(model=MODEL, verifier_flags=["--speculation-depth", "limits"]) as gateway,
        TandemClient(gateway.address) as client,
    ):
        # Long enough for a slow machine, whose first drafts may come late.
        request = GenerationRequest(prompt=PROMPT, max_new_tokens=400, ignore_eos=True)
        usage = client.generate(request).usage
    assert usage.num_accepted_tokens > 0

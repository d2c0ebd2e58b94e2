"""Traces from the verifier to the client, and acceptance by match length."""

import grpc
import pytest

from gateway.errors import UnreadError, VerifierError
from gateway.generation import unread_output
from gateway.generation.generation import Generation
from gateway.messages.response import Chunk, Traced
from gateway.messages.sizes import MAX_STEP_BYTES, MAX_UNREAD_STEPS_BYTES
from gateway.text.tokenizer import Tokenizer
from servicekit.errors import field_violation
from tandem.v1 import drafter_pb2, sampling_pb2, verifier_pb2
from tests.gateway.factories import append_step, make_generation
from tests.gateway.running_gateway import StartGateway, collect, error_of
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier

STEP = sampling_pb2.StepTrace(
    step_id=7,
    num_computed_tokens=3,
    num_scheduled_tokens=2,
    input_token_ids=[3, 5],
    positions=[2, 3],
    slot_mapping=[18, 19],
    logits_indices=[0, 1],
    draft_token_ids=[5],
    num_accepted_tokens=1,
    output_token_ids=[5, 6],
    context_length_after=5,
    proposals=[
        sampling_pb2.ProposalTrace(
            base_length=3,
            token_ids=[5, 9],
            matched_ngram_length=2,
            source=drafter_pb2.SOURCE_POOL,
        )
    ],
)


def traced(sequence_id: str, step: sampling_pb2.StepTrace = STEP) -> verifier_pb2.Event:
    return verifier_pb2.Event(
        step_traced=verifier_pb2.StepTraced(sequence_id=sequence_id, step=step)
    )


def read_all(generation: Generation) -> list[Chunk | Traced]:
    events = []
    while (event := generation.read()) is not None:
        events.append(event)
    return events


class TestTracedGeneration:
    def test_each_trace_comes_before_its_steps_tokens(self) -> None:
        generation = make_generation(trace=True)
        generation.append_trace(b"a chunk of the prompt")
        generation.publish()
        assert generation.changed.is_set(), "a trace is shown before there is a token"
        assert read_all(generation) == [Traced(choice_index=0, step=b"a chunk of the prompt")]
        for step in (b"first", b"second"):
            generation.append_trace(step)
            append_step(generation, [4, 5])
        generation.publish()
        first, chunk, second, last = read_all(generation)
        assert (first, second) == (
            Traced(choice_index=0, step=b"first"),
            Traced(choice_index=0, step=b"second"),
        )
        assert isinstance(chunk, Chunk)
        assert isinstance(last, Chunk)
        assert (chunk.offset, last.offset) == (0, 2)

    def test_traces_after_a_stop_string_are_dropped(self, tokenizer: Tokenizer) -> None:
        generation = make_generation(tokenizer=tokenizer, stop_sequences=["b"], trace=True)
        for character in "abc":
            generation.append_trace(character.encode())
            append_step(generation, tokenizer.encode(character))
        generation.publish()
        told = [each.step for each in read_all(generation) if isinstance(each, Traced)]
        assert told == [b"a", b"b"]

    def test_a_trace_that_was_not_requested_or_is_too_large_is_an_error_of_the_verifier(
        self,
    ) -> None:
        with pytest.raises(VerifierError):
            make_generation().append_trace(b"step")
        generation = make_generation(trace=True)
        with pytest.raises(VerifierError):
            generation.append_trace(b"x" * (MAX_STEP_BYTES + 1))
        generation.publish()
        assert read_all(generation) == []

    def test_unread_traces_are_bounded_and_read_ones_do_not_count(self) -> None:
        generation = make_generation(trace=True)
        step = b"x" * MAX_STEP_BYTES
        for _ in range(100):
            generation.append_trace(step)
            generation.publish()
            read_all(generation)
        for _ in range(MAX_UNREAD_STEPS_BYTES // MAX_STEP_BYTES):
            generation.append_trace(step)
        with pytest.raises(UnreadError):
            generation.append_trace(step)


@pytest.mark.stand_in
class TestCalls:
    async def test_where_the_operator_does_not_allow_it_a_trace_is_refused_by_name(
        self, start_gateway: StartGateway, verifier: ScriptedVerifier
    ) -> None:
        running = await start_gateway(verifiers=[verifier.address])
        error = await error_of(running.call(1, 2, 3, trace=True))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        violation = field_violation(error)
        assert violation is not None
        assert violation[0] == "trace"
        assert verifier.commands("open") == []

    async def test_a_client_that_leaves_its_traces_unread_fails_alone(
        self,
        start_gateway: StartGateway,
        verifier: ScriptedVerifier,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(unread_output, "MAX_UNREAD_STEPS_BYTES", 1000)
        running = await start_gateway(verifiers=[verifier.address], allow_trace=True)
        call, other = running.call(1, 2, 3, trace=True), running.call(4, trace=True)
        opens = [await verifier.nth("open", 0), await verifier.nth("open", 1)]
        bystander, opened = sorted(opens, key=lambda each: len(each.token_ids))
        # In one message, so that the client can read none of it before.
        verifier.send(*[traced(opened.sequence_id)] * 100)
        error = await error_of(call)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # Its client's fault, which burns no error budget.
        assert running.sample("tandem_requests_unread_total") == 1
        assert running.sample("tandem_request_errors_total", code="RESOURCE_EXHAUSTED") == 1
        assert running.sample("tandem_requests_shed_total") == 0
        assert (await verifier.nth("close", 0)).sequence_id == opened.sequence_id
        verifier.send(
            traced(bystander.sequence_id),
            verifier.decided(bystander.sequence_id, 1, [5], finish=STOP),
        )
        assert len((await collect(other)).traced) == 1
        assert running.sample("tandem_peer_messages_ignored_total", peer="verifier") == 0

    async def test_acceptance_is_counted_by_match_source_and_request(
        self, start_gateway: StartGateway, verifier: ScriptedVerifier
    ) -> None:
        running = await start_gateway(verifiers=[verifier.address])
        call = running.call(1, 2, 3)
        opened = await verifier.nth("open", 0)
        first = verifier.decided(opened.sequence_id, 3, [4, 5, 6], drafts=3, accepted=2)
        first.decided.matched_ngram_length = 4
        first.decided.source = drafter_pb2.SOURCE_SEQUENCE
        second = verifier.decided(opened.sequence_id, 6, [7], drafts=5)
        second.decided.matched_ngram_length = 1000
        second.decided.source = drafter_pb2.SOURCE_POOL
        third = verifier.decided(opened.sequence_id, 7, [7], finish=STOP)
        verifier.send(first, second, third)
        usage = (await collect(call)).usage
        assert [
            (each.matched_ngram_length, each.num_drafts, each.num_accepted_tokens)
            for each in usage.by_match_length
        ] == [(4, 1, 2), (64, 1, 0)]
        assert (usage.num_sequence_drafts, usage.num_pool_drafts) == (1, 1)

"""VerifierService over gRPC, with the bundled model."""

import asyncio
import contextlib
import dataclasses
import hashlib

import grpc
import pytest
from google.protobuf.message import Message

from servicekit.errors import code_number, field_violation
from tandem.v1 import drafter_pb2, sampling_pb2
from tandem.v1 import verifier_pb2 as pb
from tests.verifier.opens import PROMPT, VOCAB_SIZE, make_open
from tests.verifier.running_verifier import (
    PATIENCE_S,
    StartVerifier,
)
from verifier.build import LoadedModel
from verifier.config import VerifierConfig
from verifier.errors import OverloadedError
from verifier.service import event_wire

INVALID = code_number(grpc.StatusCode.INVALID_ARGUMENT)
UNIMPLEMENTED = code_number(grpc.StatusCode.UNIMPLEMENTED)


class TestGreeting:
    async def test_hello_is_answered_by_welcome(
        self,
        start_verifier: StartVerifier,
        bundled_config: VerifierConfig,
        bundled_model: LoadedModel,
    ) -> None:
        running = await start_verifier()
        welcome = await running.session().hello()
        served = bundled_model.served
        assert welcome.protocol_version == 1
        assert welcome.model_id == "renamer"
        assert welcome.model_digest == served.model_digest
        tokenizer = (bundled_config.model / "tokenizer.json").read_bytes()
        assert welcome.tokenizer_digest == hashlib.sha256(tokenizer).hexdigest()
        assert welcome.numerics_digest == served.numerics_digest
        assert welcome.instance_id == served.instance_id
        assert welcome.limits == pb.Limits(
            max_model_len=2048,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            max_num_speculative_tokens=31,
            vocab_size=VOCAB_SIZE,
            block_size=16,
            num_kv_blocks=512,
        )

    @pytest.mark.parametrize("allow_trace", [False, True])
    def test_welcome_says_whether_steps_may_be_traced(
        self, bundled_model: LoadedModel, allow_trace: bool
    ) -> None:
        served = dataclasses.replace(bundled_model.served, allow_trace=allow_trace)
        assert event_wire.welcome(served).events[0].welcome.allows_trace == allow_trace

    @pytest.mark.parametrize(
        ("command", "field"),
        [
            (pb.Command(hello=pb.Hello(protocol_version=2)), "commands[0].hello.protocol_version"),
            (pb.Command(hello=pb.Hello()), "commands[0].hello.protocol_version"),
            (pb.Command(open=make_open()), "commands[0].hello"),
            (pb.Command(), "commands[0].hello"),
        ],
        ids=["another version", "no version", "no Hello", "unknown command"],
    )
    async def test_a_session_that_does_not_begin_with_hello_ends_at_once(
        self, start_verifier: StartVerifier, command: pb.Command, field: str
    ) -> None:
        session = (await start_verifier()).session()
        await session.send(command)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await session.call.read()
        assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        violation = field_violation(error.value)
        assert violation is not None
        assert violation[0] == field

    @pytest.mark.parametrize(
        ("command", "field"),
        [
            (pb.Command(draft=pb.Draft(sequence_id="x" * 65)), "draft.sequence_id"),
            (
                pb.Command(draft=pb.Draft(sequence_id="a", token_ids=[1] * 8193)),
                "draft.token_ids",
            ),
            (pb.Command(update=pb.Update(sequence_id="é" * 33)), "update.sequence_id"),
            (pb.Command(close=pb.Close(sequence_id="x" * 65)), "close.sequence_id"),
            (pb.Command(), "commands"),
            (pb.Command(hello=pb.Hello(protocol_version=1)), "commands.hello"),
        ],
        ids=["draft's id", "draft's tokens", "update", "close", "unknown command", "second Hello"],
    )
    async def test_a_bad_command_is_rejected_alone(
        self,
        start_verifier: StartVerifier,
        greedy_output: list[int],
        command: pb.Command,
        field: str,
    ) -> None:
        session = await (await start_verifier()).greeted_session()
        await session.send(pb.Command(open=make_open()), command, command)
        rejected = await session.wait_rejected()
        assert (rejected.sequence_id, rejected.code, rejected.field) == ("", INVALID, field)
        assert await session.wait_finished("a") == greedy_output
        assert len(session.rejected()) == 2

    @pytest.mark.parametrize(
        ("request_", "field"),
        [
            (
                pb.SessionRequest(
                    commands=[pb.Command(hello=pb.Hello(protocol_version=1, gateway_id="x" * 257))]
                ),
                "commands[0].hello.gateway_id",
            ),
            (
                pb.SessionRequest(
                    commands=[
                        pb.Command(hello=pb.Hello(protocol_version=1)),
                        *[pb.Command(close=pb.Close(sequence_id="x"))] * 16_384,
                    ]
                ),
                "commands",
            ),
        ],
        ids=["gateway's id", "number of commands"],
    )
    async def test_a_message_over_a_limit_ends_its_session_alone(
        self,
        start_verifier: StartVerifier,
        greedy_output: list[int],
        request_: pb.SessionRequest,
        field: str,
    ) -> None:
        running = await start_verifier()
        bystander = await running.greeted_session()
        session = running.session()
        await session.call.write(request_)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            [_ async for _ in session.call]
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        violation = field_violation(error.value)
        assert violation is not None
        assert violation[0] == field
        await bystander.open(make_open())
        assert await bystander.wait_finished("a") == greedy_output


SamplingParams = sampling_pb2.SamplingParams

BAD_OPENS: dict[str, tuple[pb.Open, str]] = {
    "no id": (make_open(""), "sequence_id"),
    "long id": (make_open("x" * 65), "sequence_id"),
    "id of many bytes": (make_open("\N{SNOWMAN}" * 22), "sequence_id"),
    "no tokens": (make_open(token_ids=[]), "token_ids"),
    "token out of range": (make_open(token_ids=[1, VOCAB_SIZE]), "token_ids"),
    "huge token": (make_open(token_ids=[2**32 - 1]), "token_ids"),
    "no room": (make_open(token_ids=[1] * 2048), "token_ids"),
    "far too long": (make_open(token_ids=[1] * 500_000), "token_ids"),
    "prompt longer than tokens": (make_open(prompt_length=len(PROMPT) + 1), "prompt_length"),
    "output complete already": (
        make_open(prompt_length=4, max_new_tokens=8),
        "max_new_tokens",
    ),
    "unknown draft wait": (make_open(draft_wait=9), "draft_wait"),
    "a prediction that is too long": (
        make_open(predicted_token_ids=[1] * 2049),
        "predicted_token_ids",
    ),
    "a prediction outside the vocabulary": (
        make_open(predicted_token_ids=[VOCAB_SIZE]),
        "predicted_token_ids",
    ),
    "too heavy a tenant": (make_open(tenant_weight=1001), "tenant_weight"),
    "too many drafts": (make_open(num_speculative_tokens=32), "num_speculative_tokens"),
    "stop token out of range": (
        # It would be looked up among the logits.
        make_open(stop_token_ids=[VOCAB_SIZE], sampling=SamplingParams(min_new_tokens=1)),
        "stop_token_ids",
    ),
    "too many stop tokens": (make_open(stop_token_ids=range(1025)), "stop_token_ids"),
    "too many biases": (
        make_open(sampling=SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))),
        "sampling.logit_bias",
    ),
    "long digest": (make_open(expected_model_digest="x" * 257), "expected_model_digest"),
    "more tokens than any model takes": (make_open(token_ids=[1] * (1 << 20 | 1)), "token_ids"),
    "bias of no token": (
        make_open(sampling=SamplingParams(logit_bias={VOCAB_SIZE: 1})),
        "sampling.logit_bias",
    ),
    "too many logprobs": (make_open(sampling=SamplingParams(logprobs=21)), "sampling.logprobs"),
    "too many prompt logprobs": (
        make_open(sampling=SamplingParams(prompt_logprobs=21)),
        "sampling.prompt_logprobs",
    ),
    "long salt": (make_open(cache_salt="x" * 257), "cache_salt"),
    "no seed": (make_open(sampling=SamplingParams(temperature=1)), "sampling.seed"),
    "unknown logprobs mode": (
        make_open(sampling=SamplingParams(logprobs_mode=7)),  # type: ignore[arg-type]
        "sampling.logprobs_mode",
    ),
    "no trace parent": (make_open(trace_parent="00-1-2-01"), "trace_parent"),
    "drafter not admitted": (make_open(drafter_address="localhost:1"), "drafter_address"),
    "unknown keep": (
        make_open(ngram=drafter_pb2.NgramParams(), keep=9),
        "keep",
    ),
}
UNSUPPORTED_OPENS: dict[str, Message] = {
    "trace": make_open(trace=True),
    # Of an older version: num_beams, 2.
    "sampling.14": make_open(sampling=SamplingParams.FromString(b"\x70\x02")),
    # Of a newer version.
    "sampling.1012": make_open(sampling=SamplingParams.FromString(b"\xa0\x3f\x01")),
}


class TestOpening:
    async def test_every_bad_field_is_rejected_by_name_and_others_go_on(
        self, start_verifier: StartVerifier, greedy_output: list[int]
    ) -> None:
        running = await start_verifier()
        session = await running.greeted_session()
        # An id that is too long itself is not repeated.
        expected = [
            ("" if field == "sequence_id" else bad.sequence_id, INVALID, field)
            for bad, field in BAD_OPENS.values()
        ]
        expected += [
            (unsupported.sequence_id, UNIMPLEMENTED, field)  # type: ignore[attr-defined]
            for field, unsupported in UNSUPPORTED_OPENS.items()
        ]
        opens = [*(bad for bad, _ in BAD_OPENS.values()), *UNSUPPORTED_OPENS.values()]
        for bad in opens:
            await session.open(bad)  # type: ignore[arg-type]
        await session.wait_rejected(len(expected))
        rejected = session.rejected()
        names = [*BAD_OPENS, *UNSUPPORTED_OPENS]
        found = {
            name: (r.sequence_id, r.code, r.field) for name, r in zip(names, rejected, strict=True)
        }
        assert found == dict(zip(names, expected, strict=True))
        assert all(r.message for r in rejected)
        await session.open(make_open("good"))
        assert await session.wait_finished("good") == greedy_output

    async def test_another_model_is_refused(
        self, start_verifier: StartVerifier, bundled_model: LoadedModel
    ) -> None:
        session = await (await start_verifier()).greeted_session()
        await session.open(
            make_open("other", expected_model_digest="0" * 64),
            make_open(
                "same",
                expected_model_digest=bundled_model.served.model_digest,
                max_new_tokens=1,
            ),
        )
        rejected = await session.wait_rejected()
        assert rejected.sequence_id == "other"
        assert rejected.code == code_number(grpc.StatusCode.FAILED_PRECONDITION)
        assert rejected.field == "expected_model_digest"
        await session.wait_finished("same")

    async def test_overload_says_when_to_retry(self, start_verifier: StartVerifier) -> None:
        running = await start_verifier(max_num_seqs=1, max_num_waiting=1)
        session = await running.greeted_session()
        await session.open(*(make_open(str(i), draft_wait=pb.DRAFT_WAIT_ALWAYS) for i in range(3)))
        rejected = await session.wait_rejected()
        assert rejected.sequence_id == "2"
        assert rejected.code == code_number(grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert rejected.retry_after_ms > 0


class TestPromptLogprobs:
    async def test_over_the_bound_are_refused(self, start_verifier: StartVerifier) -> None:
        running = await start_verifier(max_model_len=8000)
        session = await running.greeted_session()
        sampling = sampling_pb2.SamplingParams(prompt_logprobs=20)
        await session.open(make_open(token_ids=[1] * 6500, sampling=sampling))
        rejected = await session.wait_rejected()
        assert (rejected.code, rejected.field) == (INVALID, "sampling.prompt_logprobs")


class TestSessions:
    @pytest.mark.parametrize("keep", [0, 9], ids=["nothing", "of a newer gateway"])
    async def test_close_is_answered_by_cancelled(
        self, start_verifier: StartVerifier, keep: drafter_pb2.Keep.ValueType
    ) -> None:
        running = await start_verifier()
        session = await running.greeted_session()
        await session.open(make_open(draft_wait=pb.DRAFT_WAIT_ALWAYS))
        await session.wait_decided("a")
        await session.send(pb.Command(close=pb.Close(sequence_id="a", keep=keep)))
        decided = await session.wait_decided("a", 2)
        assert decided.finish_reason == sampling_pb2.FINISH_REASON_CANCELLED
        assert not decided.token_ids
        await running.idle()

    @pytest.mark.parametrize("end", ["cancel", "done_writing"])
    async def test_ending_the_stream_frees_all_blocks(
        self, start_verifier: StartVerifier, end: str
    ) -> None:
        running = await start_verifier(max_num_seqs=2)
        session = await running.greeted_session()
        for i in range(4):
            salt = str(i)  # so that no block is shared
            await session.open(make_open(salt, draft_wait=pb.DRAFT_WAIT_ALWAYS, cache_salt=salt))
        await session.wait_decided("1")
        await running.sync()
        assert (await running.load()).num_kv_blocks_used == 6, "3 for each prompt"
        if end == "cancel":
            session.call.cancel()
        else:
            await session.call.done_writing()
            assert await session.read_to_end() == grpc.StatusCode.OK
        await running.idle()

    async def test_a_session_that_does_not_read_is_ended_and_frees_its_blocks(
        self,
        start_verifier: StartVerifier,
        greedy_output: list[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("verifier.server._MAX_SESSION_EVENT_BYTES", 1 << 20)
        running = await start_verifier()
        session = await running.greeted_session()
        [its_server] = running.verifier.servicer._sessions
        other = await running.greeted_session()
        await session.open(make_open(draft_wait=pb.DRAFT_WAIT_ALWAYS))
        await session.wait_decided("a")
        # Each of them is answered, with more bytes than it has. The transport buffers several
        # times the bound before it blocks the server's writes.
        bad = [pb.Command(open=pb.Open(sequence_id="x" * 40))] * 2500

        async def flood() -> None:
            # A write waits once nobody reads it, and fails once the stream has ended.
            with contextlib.suppress(grpc.aio.AioRpcError):
                while True:
                    await session.send(*bad)

        flooding = asyncio.create_task(flood())
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wrap_future(running.engine.when_idle())
        assert (await running.load()).num_kv_blocks_used == 0
        await other.open(make_open())
        assert await other.wait_finished("a") == greedy_output, "others go on"
        assert isinstance(its_server._error, OverloadedError)
        # The end, and that of reading.
        assert its_server._responses.qsize() <= 2, "what it will never be sent is still kept"
        # grpc.aio says INTERNAL instead if a write was under way when the session ended.
        statuses = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL
        assert await session.read_to_end() in statuses
        async with asyncio.timeout(PATIENCE_S):
            await flooding
        size = sum(response.ByteSize() for response in session.responses)
        assert size < 16 << 20, "what was kept for it is not bounded"

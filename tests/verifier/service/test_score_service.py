"""`Score` over gRPC, with the bundled model."""

import asyncio
import math
import threading
from collections.abc import Callable

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

import verifier.service.servicer
from servicekit.errors import field_violation, retry_after_ms
from tandem.v1 import sampling_pb2
from tandem.v1 import verifier_pb2 as pb
from tests.verifier.conftest import MODEL_FOLDER
from tests.verifier.paged_model import some_tokens
from tests.verifier.running_engine import RecordingObserver
from tests.verifier.running_verifier import PATIENCE_S, RunningVerifier, StartVerifier
from tests.verifier.scoring_engine import oracle_logits
from verifier.build import LoadedModel
from verifier.engine.observation import StepRecord
from verifier.sampling.logits_processing import target_probs
from verifier.service.score_call import ScoreCall

VOCAB_SIZE = 2048
TEXT = some_tokens(60, VOCAB_SIZE)
METHODS = (pb.METHOD_SINGLE_PASS, pb.METHOD_BATCH_EXPANSION)


def sequence(num_tokens: int, num_drafts: int) -> pb.ScoreSequence:
    return pb.ScoreSequence(
        token_ids=TEXT[:num_tokens], draft_token_ids=TEXT[num_tokens : num_tokens + num_drafts]
    )


def request(*sequences: pb.ScoreSequence, **fields: object) -> pb.ScoreRequest:
    return pb.ScoreRequest(sequences=sequences, **fields)  # type: ignore[arg-type]


async def call(running: RunningVerifier, message: pb.ScoreRequest) -> pb.ScoreResponse:
    async with asyncio.timeout(PATIENCE_S):
        return await running.stub.Score(message)


async def error_of(running: RunningVerifier, message: pb.ScoreRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(running, message)
    return raised.value


class TestAnswers:
    @pytest.mark.parametrize("method", METHODS)
    async def test_top_token_draft_and_likeliest_per_position(
        self, start_verifier: StartVerifier, method: pb.Method
    ) -> None:
        running = await start_verifier(max_num_batched_tokens=20)
        sequences = [sequence(30, 5), sequence(1, 0), sequence(7, 2)]
        response = await call(
            running, request(*sequences, top_logprobs=3, prompt_logprobs=True, method=method)
        )
        for asked, reported in zip(sequences, response.sequences, strict=True):
            drafts = list(asked.draft_token_ids)
            logits = oracle_logits(list(asked.token_ids) + drafts)
            expected = torch.log_softmax(logits.double(), dim=-1)
            rows = expected[len(asked.token_ids) - 1 :]
            assert len(reported.positions) == len(drafts) + 1
            assert not reported.positions[-1].HasField("draft")
            for position, row in zip(reported.positions, rows, strict=True):
                assert position.top_token_id == position.top[0].token_id == int(row.argmax())
                assert [t.rank for t in position.top] == [1, 2, 3]
                assert [t.token_id for t in position.top] == row.topk(3).indices.tolist()
            for draft, position, row in zip(drafts, reported.positions, rows, strict=False):
                assert position.draft.token_id == draft
                assert abs(position.draft.logprob - float(row[draft])) < 1e-4
                assert position.draft.rank == int((row > row[draft]).sum()) + 1
            assert reported.prompt_logprobs[0] == sampling_pb2.TokenLogprob()
            assert [p.token_id for p in reported.prompt_logprobs[1:]] == asked.token_ids[1:]
            for token, prompt_row in zip(reported.prompt_logprobs[1:], expected, strict=False):
                assert abs(token.logprob - float(prompt_row[token.token_id])) < 1e-4
                assert len(token.top) == 3

    async def test_an_end_token_that_comes_too_early_is_impossible(
        self, start_verifier: StartVerifier, bundled_model: LoadedModel
    ) -> None:
        running = await start_verifier()
        (end,) = bundled_model.served.eos_token_ids
        asked = pb.ScoreSequence(token_ids=TEXT[:9], draft_token_ids=[end])
        logprobs = []
        for min_new_tokens in (0, 1):
            sampling = sampling_pb2.SamplingParams(min_new_tokens=min_new_tokens)
            response = await call(running, request(asked, sampling=sampling))
            logprobs.append(response.sequences[0].positions[0].draft.logprob)
        assert logprobs[0] > -math.inf
        assert logprobs[1] == -math.inf

    async def test_drafts_that_cannot_be_scored_are_left_out_with_a_reason(
        self, start_verifier: StartVerifier
    ) -> None:
        running = await start_verifier(max_model_len=40)
        outside = pb.ScoreSequence(token_ids=TEXT[:9], draft_token_ids=[5, VOCAB_SIZE])
        response = await call(
            running, request(outside, sequence(38, 3), sequence(38, 2), sequence(40, 0))
        )
        assert [len(s.positions) for s in response.sequences] == [1, 1, 3, 1]
        reasons = [s.unscored_reason for s in response.sequences]
        assert "vocabulary" in reasons[0]
        assert "limit of 40" in reasons[1]
        assert reasons[2:] == ["", ""]


class TestFullScores:
    @pytest.mark.parametrize("method", METHODS)
    async def test_are_transformers_distributions_and_hidden_states(
        self, start_verifier: StartVerifier, method: pb.Method
    ) -> None:
        running = await start_verifier(max_num_batched_tokens=20)
        sequences = [sequence(30, 5), sequence(1, 0), sequence(7, 2)]
        parameters = sampling_pb2.SamplingParams(temperature=0.7, top_k=50, repetition_penalty=1.2)
        response = await call(
            running,
            request(
                *sequences,
                sampling=parameters,
                distributions=True,
                hidden_states=True,
                prompt_logprobs=True,
                method=method,
            ),
        )
        model = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32).eval()
        for asked, reported in zip(sequences, response.sequences, strict=True):
            prompt, drafts = list(asked.token_ids), list(asked.draft_token_ids)
            with torch.inference_mode():
                oracle = model(torch.tensor([prompt + drafts]), output_hidden_states=True)
            first = len(prompt) - 1
            probs = target_probs(oracle.logits[0, first:], parameters, prompt, [], drafts)
            states = oracle.hidden_states[-1][0, first:]
            assert len(reported.positions) == len(drafts) + 1
            assert_floats([p.probs for p in reported.positions], probs, 1e-4)
            assert_floats([p.hidden_state for p in reported.positions], states, 1e-3)
            for position in reported.positions:
                told_probs = torch.frombuffer(bytearray(position.probs), dtype=torch.float32)
                logprobs = torch.frombuffer(bytearray(position.logprobs), dtype=torch.float32)
                torch.testing.assert_close(logprobs.exp(), told_probs)

    @pytest.mark.parametrize("name", ["distributions", "hidden_states"])
    async def test_are_refused_by_name_unless_enabled(
        self, start_verifier: StartVerifier, name: str
    ) -> None:
        running = await start_verifier(gives_full_scores=False)
        error = await error_of(running, request(sequence(3, 1), **{name: True}))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        violation = field_violation(error)
        assert violation
        assert violation[0] == name

    async def test_may_take_what_a_client_takes_and_no_more(
        self, start_verifier: StartVerifier
    ) -> None:
        running = await start_verifier()
        # 254 positions, each of 2 x 2,048 floats and what is beside them.
        most = [*[sequence(3, 50)] * 4, sequence(3, 49)]
        response = await call(running, request(*most, distributions=True))
        assert 4_150_000 < response.ByteSize() <= 4 << 20
        over = request(*most, sequence(3, 0), distributions=True)
        error = await error_of(running, over)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        violation = field_violation(error)
        assert violation
        assert violation[0] == "distributions"

    async def test_of_all_calls_are_bounded(
        self, start_verifier: StartVerifier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        running = await start_verifier()
        full = request(sequence(3, 1), distributions=True)
        monkeypatch.setattr(verifier.service.servicer, "MAX_SCORED_TENSOR_BYTES", 2 * 2 * 2048 * 4)
        servicer = running.verifier.servicer
        await call(running, full)
        assert servicer._num_scored_tensor_bytes == 0
        servicer._num_scored_tensor_bytes = 1
        error = await error_of(running, full)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_after_ms(error)
        await call(running, request(sequence(3, 1)))


def assert_floats(reported: list[bytes], expected: torch.Tensor, atol: float) -> None:
    rows = [torch.frombuffer(bytearray(row), dtype=torch.float32) for row in reported]
    torch.testing.assert_close(torch.stack(rows), expected, atol=atol, rtol=0)


BAD: dict[str, tuple[pb.ScoreRequest, str]] = {
    "nothing": (request(), "sequences"),
    "no tokens": (request(sequence(3, 1), pb.ScoreSequence()), "sequences[1].token_ids"),
    "unknown token": (
        request(*[sequence(3, 1)] * 3, pb.ScoreSequence(token_ids=[1, VOCAB_SIZE])),
        "sequences[3].token_ids",
    ),
    "too long": (
        request(pb.ScoreSequence(token_ids=[1] * 3000)), "sequences[0].token_ids"
    ),
    "too many sequences": (request(*[sequence(1, 0)] * 257), "sequences"),
    "long salt": (request(sequence(3, 1), cache_salt="x" * 257), "cache_salt"),
    "longer than any": (
        request(pb.ScoreSequence(token_ids=[1] * 131_073)), "sequences[0].token_ids"
    ),
    "too large": (
        request(*[pb.ScoreSequence(token_ids=[1] * 131_072)] * 9, cache_salt="x"),
        "sequences",
    ),
    "too many tokens": (request(*[pb.ScoreSequence(token_ids=[1] * 2000)] * 70), "sequences"),
    "too many likeliest": (request(sequence(3, 1), top_logprobs=21), "top_logprobs"),
    "too much to answer": (
        request(pb.ScoreSequence(token_ids=[1] * 2000), top_logprobs=20, prompt_logprobs=True),
        "prompt_logprobs",
    ),
    "unknown method": (request(sequence(3, 1), method=7), "method"),
    "bad sampling": (
        request(sequence(3, 1), sampling=sampling_pb2.SamplingParams(top_p=2)), "sampling.top_p"
    ),
    "logprobs elsewhere": (
        request(sequence(3, 1), sampling=sampling_pb2.SamplingParams(logprobs=2)),
        "sampling.logprobs",
    ),
    "prompt logprobs elsewhere": (
        request(sequence(3, 1), sampling=sampling_pb2.SamplingParams(prompt_logprobs=2)),
        "sampling.prompt_logprobs",
    ),
}  # fmt: skip


class TestRefusals:
    async def test_name_the_field(self, start_verifier: StartVerifier) -> None:
        running = await start_verifier()
        found = {}
        for name, (message, _) in BAD.items():
            error = await error_of(running, message)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, (name, error)
            violation = field_violation(error)
            found[name] = violation and violation[0]
        assert found == {name: field for name, (_, field) in BAD.items()}

    async def test_a_server_without_logprobs_scores_nothing(
        self, start_verifier: StartVerifier
    ) -> None:
        running = await start_verifier(gives_logprobs=False)
        error = await error_of(running, request(sequence(3, 1)))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED

    async def test_an_operator_can_switch_it_off(self, start_verifier: StartVerifier) -> None:
        running = await start_verifier(score="none")
        error = await error_of(running, request(sequence(3, 1)))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert error.details() == "Score is not enabled on this server"
        assert await running.stub.GetModelInfo(pb.GetModelInfoRequest())

    async def test_overload_says_when_to_retry(
        self, start_verifier: StartVerifier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        running = await start_verifier(max_num_seqs=1, max_num_waiting=1)
        session = await running.greeted_session()
        # Occupies the only place in a step, and waits for a draft.
        await session.open(
            pb.Open(
                sequence_id="a", token_ids=[1], ignore_eos=True, draft_wait=pb.DRAFT_WAIT_ALWAYS
            )
        )
        await session.wait_decided("a")
        error = await error_of(running, request(*[sequence(20, 1)] * 2))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_after_ms(error)
        session.call.cancel()
        await running.idle()
        monkeypatch.setattr(verifier.service.servicer, "MAX_SCORED_TOKENS", 30)
        servicer = running.verifier.servicer
        assert servicer._num_scored_tokens == 0
        assert len((await call(running, request(sequence(40, 1)))).sequences) == 1
        servicer._num_scored_tokens = 26
        error = await error_of(running, request(sequence(4, 1)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_after_ms(error)
        assert len((await call(running, request(sequence(3, 1)))).sequences) == 1
        assert servicer._num_scored_tokens == 26
        servicer._num_scored_tokens = 0


class HoldingObserver(RecordingObserver):
    """Pauses the engine after each step, with the next one launched, after signalling it."""

    def __init__(self, say_so: Callable[[], object]) -> None:
        super().__init__()
        self.may_go_on = threading.Event()
        self._say_so = say_so

    def stepped(self, record: StepRecord) -> None:
        super().stepped(record)
        self._say_so()
        assert self.may_go_on.wait(PATIENCE_S)


async def test_a_cancelled_call_frees_its_blocks_within_a_step(
    start_verifier: StartVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, has_stepped, is_closed = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    observer = HoldingObserver(lambda: loop.call_soon_threadsafe(has_stepped.set))
    close = ScoreCall.close

    def close_and_say_so(scored: ScoreCall) -> None:
        close(scored)
        is_closed.set()

    monkeypatch.setattr(ScoreCall, "close", close_and_say_so)
    running = await start_verifier(max_num_batched_tokens=16, observer=observer)
    rpc = running.stub.Score(request(pb.ScoreSequence(token_ids=[1] * 2000)))
    async with asyncio.timeout(PATIENCE_S):
        # The call begins when it is awaited or written.
        waiting = asyncio.ensure_future(rpc)
        await has_stepped.wait()
        rpc.cancel()
        await is_closed.wait()
    observer.may_go_on.set()
    await running.idle()
    # The one that was under way.
    assert len(observer.steps) == 2
    with pytest.raises(asyncio.CancelledError):
        await waiting

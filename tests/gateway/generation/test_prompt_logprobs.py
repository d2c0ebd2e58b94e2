"""A prompt's logprobs, from the verifier's chunks to the client."""

import pytest

from gateway.errors import VerifierError
from gateway.generation.generation import Generation
from gateway.messages.response import EncodedLogprob
from gateway.messages.verifier import PromptScored
from tandem.v1 import sampling_pb2, verifier_pb2
from tandem.values import SamplingParams
from tests.gateway.factories import append_step, encoded_logprob, make_generation, read_chunk
from tests.gateway.running_gateway import StartGateway, collect
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier

REQUESTED = SamplingParams(prompt_logprobs=0)


def logprob(token_id: int) -> EncodedLogprob:
    return encoded_logprob(token_id)


def scored(base_length: int, end: int) -> PromptScored:
    return PromptScored(
        sequence_id="sequence",
        base_length=base_length,
        logprobs=[logprob(i) for i in range(base_length, end)],
    )


def prompt_of(num_tokens: int) -> Generation:
    return make_generation(range(num_tokens), sampling=REQUESTED)


class TestScoredPrompts:
    def test_repeated_logprobs_are_ignored(self) -> None:
        generation = prompt_of(6)
        for base_length, end in ((1, 3), (1, 2), (1, 4), (3, 6), (2, 6)):
            generation.append_prompt_logprobs(scored(base_length, end))
        append_step(generation, [7])
        generation.publish()
        chunk = read_chunk(generation)
        assert chunk is not None
        assert list(chunk.prompt_logprobs) == [b"", *(logprob(i) for i in range(1, 6))]

    @pytest.mark.parametrize(("base_length", "end"), [(2, 3), (0, 3), (1, 6)])
    def test_missing_or_surplus_logprobs_are_an_error_of_the_verifier(
        self, base_length: int, end: int
    ) -> None:
        with pytest.raises(VerifierError):
            prompt_of(5).append_prompt_logprobs(scored(base_length, end))

    def test_a_token_before_the_last_logprob_is_an_error_of_the_verifier(self) -> None:
        generation = prompt_of(5)
        generation.append_prompt_logprobs(scored(1, 4))
        with pytest.raises(VerifierError):
            append_step(generation, [7])


@pytest.mark.stand_in
class TestGateway:
    @staticmethod
    def scored(sequence_id: str, base_length: int, end: int) -> verifier_pb2.Event:
        return verifier_pb2.Event(
            prompt_scored=verifier_pb2.PromptScored(
                sequence_id=sequence_id,
                base_length=base_length,
                logprobs=[
                    sampling_pb2.TokenLogprob(
                        token_id=i % 50, logprob=-i, rank=1,
                        top=[sampling_pb2.TokenLogprob(token_id=3, logprob=-1, rank=1)],
                    )
                    for i in range(base_length, end)
                ],
            )
        )  # fmt: skip

    async def test_only_the_first_choice_scores_the_prompt(
        self, start_gateway: StartGateway
    ) -> None:
        verifier = ScriptedVerifier(max_model_len=8000)
        await verifier.start()
        running = await start_gateway(verifiers=[verifier.address])
        num_tokens = 5000
        call = running.call(
            *([1] * num_tokens), n=2, sampling=sampling_pb2.SamplingParams(prompt_logprobs=1)
        )
        await verifier.nth("open", 1)
        first, second = verifier.commands("open")
        assert first.sampling.prompt_logprobs == 1
        assert not second.sampling.HasField("prompt_logprobs")
        for base_length in range(1, num_tokens, 1000):
            end = min(base_length + 1000, num_tokens)
            verifier.send(self.scored(first.sequence_id, base_length, end))
        for opened in (first, second):
            verifier.send(verifier.decided(opened.sequence_id, num_tokens, [7], finish=STOP))
        output = await collect(call)
        received = [each for chunk in output.of(0).chunks for each in chunk.prompt_logprobs]
        assert received[0] == sampling_pb2.TokenLogprob()
        assert [each.logprob for each in received[1:]] == [-i for i in range(1, num_tokens)]
        assert [each.top[0].token_id for each in received[1:]] == [3] * (num_tokens - 1)
        assert not any(chunk.prompt_logprobs for chunk in output.of(1).chunks)
        assert output.of(0).token_ids == output.of(1).token_ids == [7]
        await verifier.stop()

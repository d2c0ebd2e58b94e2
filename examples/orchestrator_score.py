"""Use a verifier without a session: one Score call per step, with a growing prompt.

Needs a running `python -m verifier --model examples/demo_model/model`; takes its HOST:PORT. The
prefix cache keeps the K/V of whole blocks between calls, so a call computes little more than its
drafts. Without the cache (`--no-prefix-cache`) the output is the same but slower.
"""

import asyncio
import json
import sys
from pathlib import Path

import grpc
from tokenizers import Tokenizer

if not __package__:  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.orchestrator import propose
from tandem.v1 import verifier_pb2, verifier_pb2_grpc


async def generate(target: str, prompt: list[int], max_new_tokens: int) -> tuple[list[int], int]:
    """The output's token ids by greedy decoding, and the number of calls."""
    token_ids, num_calls = list(prompt), 0
    async with grpc.aio.insecure_channel(target) as channel:
        verifier = verifier_pb2_grpc.VerifierServiceStub(channel)
        model = await verifier.GetModelInfo(verifier_pb2.GetModelInfoRequest())
        while (left := len(prompt) + max_new_tokens - len(token_ids)) > 0:
            drafts = propose(token_ids)[: left - 1]
            scored = verifier_pb2.ScoreSequence(token_ids=token_ids, draft_token_ids=drafts)
            response = await verifier.Score(verifier_pb2.ScoreRequest(sequences=[scored]))
            num_calls += 1
            for position, draft in zip(
                response.sequences[0].positions, [*drafts, -1], strict=False
            ):
                token_ids.append(position.top_token_id)
                if token_ids[-1] in model.eos_token_ids:
                    return token_ids[len(prompt) :], num_calls
                if token_ids[-1] != draft:
                    break
    return token_ids[len(prompt) :], num_calls


if __name__ == "__main__":
    target = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50052"
    demo = Path(__file__).parent / "demo_model"
    tokenizer = Tokenizer.from_file(str(demo / "model" / "tokenizer.json"))
    task = json.loads((demo / "heldout.jsonl").read_text().splitlines()[0])
    output, num_calls = asyncio.run(generate(target, tokenizer.encode(task["prompt"]).ids, 512))
    print(tokenizer.decode(output), f"# {len(output)} tokens in {num_calls} calls", sep="\n")

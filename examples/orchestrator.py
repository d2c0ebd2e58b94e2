"""Use a verifier with drafts of your own, without gateway and drafter.

Needs a running `python -m verifier --model examples/demo_model/model`; takes its HOST:PORT.
"""

import asyncio
import json
import secrets
import sys
from pathlib import Path

import grpc
from tokenizers import Tokenizer

from tandem.v1 import verifier_pb2, verifier_pb2_grpc
from tandem.v1.verifier_pb2 import Command, Draft, Hello, Open, SessionRequest


def propose(token_ids: list[int]) -> list[int]:
    """Replace this by your own drafts: only the number of steps changes, never the output."""
    for start in range(len(token_ids) - 3, -1, -1):
        if token_ids[start : start + 2] == token_ids[-2:]:
            return token_ids[start + 2 : start + 10]
    return []


async def generate(target: str, prompt: list[int], max_new_tokens: int) -> tuple[list[int], int]:
    """The output's token ids, and the number of steps."""
    opening = Open(sequence_id=secrets.token_hex(16), token_ids=prompt)
    opening.max_new_tokens, opening.draft_wait = max_new_tokens, verifier_pb2.DRAFT_WAIT_ALWAYS
    hello = Hello(protocol_version=1, gateway_id="orchestrator")
    token_ids, num_steps = list(prompt), 0
    async with grpc.aio.insecure_channel(target) as channel:
        session = verifier_pb2_grpc.VerifierServiceStub(channel).Session()
        await session.write(SessionRequest(commands=[Command(hello=hello), Command(open=opening)]))
        async for response in session:
            for event in response.events:
                if event.HasField("rejected"):
                    raise SystemExit(f"{event.rejected.field}: {event.rejected.message}")
                if event.HasField("decided"):
                    token_ids += event.decided.token_ids
                    num_steps += 1
                    if event.decided.finish_reason:
                        return token_ids[len(prompt) :], num_steps
                    draft = Draft(sequence_id=opening.sequence_id, base_length=len(token_ids))
                    draft.token_ids.extend(propose(token_ids))
                    await session.write(SessionRequest(commands=[Command(draft=draft)]))
    raise SystemExit("the verifier ended the session")


if __name__ == "__main__":
    target = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50052"
    demo = Path(__file__).parent / "demo_model"
    tokenizer = Tokenizer.from_file(str(demo / "model" / "tokenizer.json"))
    task = json.loads((demo / "heldout.jsonl").read_text().splitlines()[0])
    output, num_steps = asyncio.run(generate(target, tokenizer.encode(task["prompt"]).ids, 512))
    print(tokenizer.decode(output), f"# {len(output)} tokens in {num_steps} steps", sep="\n")

"""Opens of sequences of the bundled model."""

from tandem.v1 import verifier_pb2 as pb

# "<|code|>def total(xs): ... <|rename|>xs<|to|>values<|out|>" in the bundled tokenizer.
PROMPT = [
    1, 319, 270, 329, 288, 12, 92, 87, 305, 275, 301, 281, 438, 275, 365, 783, 314, 783, 87, 30,
    267, 301, 984, 783, 275, 336, 301, 203, 2, 92, 87, 3, 1981, 4,
]  # fmt: skip
NUM_NEW_TOKENS = 24
VOCAB_SIZE = 2048


def make_open(sequence_id: str = "a", **fields: object) -> pb.Open:
    defaults: dict[str, object] = {
        "token_ids": PROMPT,
        "max_new_tokens": NUM_NEW_TOKENS,
        "ignore_eos": True,
        "draft_wait": pb.DRAFT_WAIT_NEVER,
    }
    return pb.Open(sequence_id=sequence_id, **(defaults | fields))  # type: ignore[arg-type]

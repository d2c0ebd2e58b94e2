"""The served model's properties and limits, as sent to clients and checked in requests."""

from dataclasses import dataclass

from tandem.v1 import verifier_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    model_id: str
    model_digest: str
    numerics_digest: str
    instance_id: str
    architecture: str
    dtype: str
    device: str
    numerics: str
    attention_backend: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_speculative_tokens: int
    vocab_size: int
    block_size: int
    num_kv_blocks: int
    eos_token_ids: frozenset[int]
    # Limit of `logprobs` and `prompt_logprobs`. None: no logprobs at all.
    max_logprobs: int | None = 20
    # Whether a request may ask for a trace of every step.
    allow_trace: bool = False
    # "": the model's folder has no tokenizer.
    tokenizer_digest: str = ""
    hidden_size: int = 0
    # Whether a `Score` request may ask for distributions and hidden states.
    allows_full_scores: bool = False

    def limits(self) -> verifier_pb2.Limits:
        return verifier_pb2.Limits(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_speculative_tokens=self.max_num_speculative_tokens,
            vocab_size=self.vocab_size,
            block_size=self.block_size,
            num_kv_blocks=self.num_kv_blocks,
        )

    def model_info(self) -> verifier_pb2.GetModelInfoResponse:
        return verifier_pb2.GetModelInfoResponse(
            model_id=self.model_id,
            model_digest=self.model_digest,
            numerics_digest=self.numerics_digest,
            instance_id=self.instance_id,
            architecture=self.architecture,
            dtype=self.dtype,
            device=self.device,
            numerics=self.numerics,
            attention_backend=self.attention_backend,
            limits=self.limits(),
            eos_token_ids=sorted(self.eos_token_ids),
            tokenizer_digest=self.tokenizer_digest,
        )

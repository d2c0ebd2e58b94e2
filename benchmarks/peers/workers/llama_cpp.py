"""llama.cpp as a peer: its C functions, called in a loop as its own examples call them.

Runs in the peer's own environment. Sequences of all streams go into one batch; drafts come from the
prompt lookup that llama-cpp-python offers (the first occurrence of the last 3, 2 or 1 tokens).
The products are compiled, the loop around them is Python, as in Tandem's engine.
"""

import ctypes
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.checkpoint import (
    read_config,
    read_tensors,
    rope_theta,
    to_bfloat16,
    to_float32,
)
from benchmarks.peers.protocol import (
    Generate,
    Options,
    Request,
    eos_token_id,
    lookup_tokens,
    serve,
)

# Installed in the environment of this peer only.
llama: Any = importlib.import_module("llama_cpp")

MAX_NGRAM = 3
BATCH_TOKENS = 2048
UBATCH_TOKENS = 512
# Tokens of K/V for each stream.
STREAM_TOKENS = 1024
# Of ggml_type.
TYPES = {"float32": 0, "bfloat16": 30}


class LlamaError(Exception):
    """A function of llama.cpp returned a failure."""


@dataclass(slots=True)
class _Sequence:
    """A request being generated."""

    id: int
    index: int
    request: Request
    # Prompt and output.
    tokens: list[int]
    # Tokens whose K/V is in the cache.
    num_computed: int = 0
    drafts: list[int] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]


def start(options: Options) -> Generate:
    path = options.converted / "model.gguf"
    if not path.exists():
        _convert(options.model, path, options.dtype)
    quiet = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    if not model:
        raise LlamaError(f"llama.cpp did not load {path}")
    contexts: dict[int, _Context] = {}

    def generate(mode: str, requests: Sequence[Request], streams: int) -> list[list[int]]:
        assert quiet, "llama.cpp calls it as long as it lives"
        if streams not in contexts:
            contexts[streams] = _Context(model, options, streams)
        return contexts[streams].run(requests, lookup_tokens(mode))

    return generate


class _Context:
    """K/V for a number of streams of a model."""

    def __init__(self, model: Any, options: Options, streams: int) -> None:
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = STREAM_TOKENS * streams
        parameters.n_seq_max = streams
        parameters.n_batch = BATCH_TOKENS
        parameters.n_ubatch = UBATCH_TOKENS
        parameters.n_threads = parameters.n_threads_batch = options.threads
        parameters.type_k = parameters.type_v = TYPES[options.dtype]
        # Faster here than flash attention, which on a CPU computes with one row at a time.
        parameters.flash_attn_type = 0
        self._context = llama.llama_init_from_model(model, parameters)
        if not self._context:
            raise LlamaError("llama.cpp made no context")
        self._memory = llama.llama_get_memory(self._context)
        self._batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)
        vocab = llama.llama_model_get_vocab(model)
        self._vocab_size = llama.llama_vocab_n_tokens(vocab)
        self._streams = streams
        self._end = eos_token_id(options.model)

    def run(self, requests: Sequence[Request], num_drafts: int) -> list[list[int]]:
        lookup = llama.llama_speculative.LlamaPromptLookupDecoding(MAX_NGRAM, num_drafts)
        waiting = list(enumerate(requests))[::-1]
        free_ids = list(range(self._streams))
        running: list[_Sequence] = []
        outputs: dict[int, list[int]] = {}
        while waiting or running:
            while waiting and free_ids:
                index, request = waiting.pop()
                running.append(_Sequence(free_ids.pop(), index, request, list(request.prompt)))
            self._step(running)
            for sequence in list(running):
                output = sequence.output
                if len(output) < sequence.request.max_new_tokens and output[-1:] != [self._end]:
                    if num_drafts:
                        self._draft(sequence, lookup)
                    continue
                outputs[sequence.index] = output
                running.remove(sequence)
                free_ids.append(sequence.id)
                llama.llama_memory_seq_rm(self._memory, sequence.id, -1, -1)
        return [outputs[index] for index in range(len(requests))]

    def _draft(self, sequence: _Sequence, lookup: Any) -> None:
        room = sequence.request.max_new_tokens - len(sequence.output) - 1
        found = lookup(np.array(sequence.tokens, np.intc))
        sequence.drafts = [int(token) for token in found[: max(0, room)]]

    def _step(self, running: Sequence[_Sequence]) -> None:
        """Computes what each sequence has not, and its drafts; appends what is decided."""
        new = [sequence.tokens[sequence.num_computed :] for sequence in running]
        starts = {}
        position = 0
        batch = self._batch
        rows = 0
        for sequence, tokens in zip(running, new, strict=True):
            if position + len(tokens) + len(sequence.drafts) > BATCH_TOKENS:
                continue  # the next step computes its prompt
            first_output = len(tokens) - 1
            starts[sequence.id] = rows
            for offset, token in enumerate([*tokens, *sequence.drafts]):
                batch.token[position] = token
                batch.pos[position] = sequence.num_computed + offset
                batch.n_seq_id[position] = 1
                batch.seq_id[position][0] = sequence.id
                batch.logits[position] = offset >= first_output
                rows += offset >= first_output
                position += 1
        batch.n_tokens = position
        if llama.llama_decode(self._context, batch):
            raise LlamaError("llama_decode failed")
        logits = np.ctypeslib.as_array(
            llama.llama_get_logits(self._context), (rows, self._vocab_size)
        )
        best = logits.argmax(1).tolist()
        for sequence in running:
            if sequence.id in starts:
                first = starts[sequence.id]
                self._decide(sequence, best[first : first + len(sequence.drafts) + 1])

    def _decide(self, sequence: _Sequence, best: Sequence[int]) -> None:
        length = len(sequence.tokens)
        for token, draft in zip(best, [*sequence.drafts, None], strict=True):
            sequence.tokens.append(token)
            if token != draft or token == self._end:
                break
        sequence.num_computed = len(sequence.tokens) - 1
        if length + len(sequence.drafts) > sequence.num_computed:
            llama.llama_memory_seq_rm(self._memory, sequence.id, sequence.num_computed, -1)
        sequence.drafts = []


def _convert(model: Path, path: Path, dtype: str) -> None:
    """Writes a GGUF file without a tokenizer, complete or not at all."""
    gguf: Any = importlib.import_module("gguf")
    config = read_config(model)
    partial = path.with_suffix(".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(partial, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, tensor in read_tensors(model):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        written = names.get_name(name, try_suffixes=(".weight",))
        if dtype == "float32" or tensor.ndim == 1:
            writer.add_tensor(written, to_float32(tensor))
        else:
            bits = to_bfloat16(tensor).view(np.uint8)
            writer.add_tensor(written, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


if __name__ == "__main__":
    serve(start)

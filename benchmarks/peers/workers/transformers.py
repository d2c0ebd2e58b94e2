"""transformers' `generate`, in left-padded batches, and with its prompt lookup for one stream."""

from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.peers.protocol import Generate, Options, Request, lookup_tokens, serve
from benchmarks.transformers_baseline import answers
from benchmarks.workloads import Task


def start(options: Options) -> Generate:
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype)
    ).eval()

    def generate(mode: str, requests: Sequence[Request], streams: int) -> list[list[int]]:
        tasks = [
            Task(prompt_token_ids=request.prompt, max_new_tokens=request.max_new_tokens)
            for request in requests
        ]
        num_drafts = lookup_tokens(mode)
        drafting = {"prompt_lookup_num_tokens": num_drafts} if num_drafts else {}
        return answers(model, tasks, streams, **drafting)

    return generate


if __name__ == "__main__":
    serve(start)

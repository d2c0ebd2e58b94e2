"""A verifier whose model computes with its random weights, and says the recorded code edits.

    python -m benchmarks.gpu.forced_verifier --model FOLDER [flags of `python -m verifier`]

Answers only requests with the prompts of `texts.replays`.
"""

import dataclasses
from unittest import mock

from benchmarks.gpu.forced_sampler import saying
from benchmarks.gpu.texts import replays
from servicekit.serving.process import end
from verifier import __main__ as verifier
from verifier.build import LoadedModel, load_model
from verifier.config import VerifierConfig
from verifier.tensor_parallel.leader import Leader


def _load(config: VerifierConfig, leader: Leader | None = None) -> LoadedModel:
    loaded = load_model(config, leader)
    texts = replays(max_new_tokens=loaded.served.max_model_len)
    return dataclasses.replace(loaded, model=saying(loaded.model, texts))


def main() -> int:
    with mock.patch("verifier.server.load_model", _load):
        return verifier.main()


if __name__ == "__main__":
    end(main())

"""Prints which kernels a loaded verifier still compiles for its engine, and while it serves.

    python -m tests.verifier.late_compilations

Kernels belong to the process: one that any other test compiled would count as compiled.
"""

import os
import sys
from pathlib import Path

from numba.core.dispatcher import Dispatcher

from tests.verifier.running_engine import EngineSession
from verifier.build import build_engine, load_model
from verifier.config import VerifierConfig
from verifier.sampling.parameters import Sampling

MODEL_FOLDER = Path(__file__).parents[2] / "examples/demo_model/model"
SAMPLINGS = (
    Sampling(),
    Sampling(logprobs=2, prompt_logprobs=1, repetition_penalty=1.1, min_new_tokens=2),
    Sampling(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=3, logprobs=1),
    Sampling(temperature=1.3, frequency_penalty=0.5, logit_bias={7: 1.0}, logprobs_mode="raw"),
)


def compiled_kernels() -> dict[str, int]:
    """How many versions of each kernel Python has called in this process."""
    return {
        f"{module_name}.{name}": len(value.signatures)
        for module_name, module in list(sys.modules.items())
        if module_name.partition(".")[0] in ("verifier", "servicekit")
        for name, value in list(vars(module).items())
        if isinstance(value, Dispatcher) and value.py_func.__module__ == module_name
    }


def main() -> None:
    config = VerifierConfig(
        model=MODEL_FOLDER, dtype="float32", threads=2, num_kv_blocks=64, device="cpu"
    )
    model = load_model(config)
    before = compiled_kernels()
    engine = build_engine(model, config, [])
    engine.start()
    session = EngineSession(engine)
    prompt = list(range(10, 50))
    for sampling in SAMPLINGS:
        sequence = session.open(prompt, sampling=sampling, max_new_tokens=6)
        session.hint(sequence, len(prompt) + 1, [11, 12, 13])
        session.wait_end(sequence)
    engine.stop()
    engine.stopped.result()
    for name, count in compiled_kernels().items():
        if count != before.get(name):
            print(f"{name}: {before.get(name)} versions, then {count}")
    sys.stdout.flush()
    # The decoder's threads wait for ever.
    os._exit(0)


if __name__ == "__main__":
    main()

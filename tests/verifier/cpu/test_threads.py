"""Threads of a pass: more of them than processors, many steps, several decoders, ends."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.verifier.chunks import Chunk
from tests.verifier.cpu.running_decoder import RunningDecoder, some_tokens, weights_of
from verifier.checkpoint.weight_types import FloatArray


def model_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("model-")}


def many_steps(running: RunningDecoder, num_steps: int) -> list[FloatArray]:
    """Logits of single tokens and chunks, which give several threads something to do."""
    tokens = some_tokens(100, running.weights.vocab_size)
    chunks = [
        Chunk(token_ids=tokens[start:end], start=start, block_table=list(range(7)), num_rows=1)
        for start, end in ((0, 40), (40, 41), (41, 70), (70, 71), (71, 72), (72, 100))
    ]
    return [running.run(chunks[step % len(chunks)])[0] for step in range(num_steps)]


def test_closing_ends_the_threads_and_steps_are_refused_then() -> None:
    before = model_threads()
    running = RunningDecoder(weights_of("llama"), num_threads=4)
    started = model_threads() - before
    assert len(started) == 3
    running.run(Chunk(token_ids=[5], start=0, block_table=[0]))
    running.decoder.close()
    running.decoder.close()
    assert not any(thread.is_alive() for thread in started)
    with pytest.raises(RuntimeError, match="closed"):
        running.run(Chunk(token_ids=[5], start=0, block_table=[0]))


def test_several_decoders_compute_side_by_side() -> None:
    weights = weights_of("llama")
    with RunningDecoder(weights) as alone:
        expected = many_steps(alone, 150)
    results: dict[int, list[FloatArray]] = {}

    def compute(number: int) -> None:
        with RunningDecoder(weights, num_threads=2) as running:
            results[number] = many_steps(running, 150)

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    for own in results.values():
        np.testing.assert_array_equal(own, expected)


EXIT = """
from tests.verifier.chunks import Chunk
from tests.verifier.cpu.running_decoder import RunningDecoder, weights_of
running = RunningDecoder(weights_of("bundled"), num_threads=3)
running.run(Chunk(token_ids=[5], start=0, block_table=[0]))
print("computed")
"""


def test_an_interpreter_exits_that_did_not_close_its_decoder() -> None:
    result = subprocess.run(
        [sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=100, check=False
    )
    assert (result.returncode, result.stdout) == (0, "computed\n"), result.stderr


BROKEN = """
import verifier.cpu.forward_threads
from tests.verifier.chunks import Chunk
from tests.verifier.cpu.running_decoder import RunningDecoder, weights_of

def fail(*arguments):
    raise MemoryError("machine code cannot be loaded")

verifier.cpu.forward_threads.await_round = fail
with RunningDecoder(weights_of("bundled"), num_threads=2) as running:
    running.run(Chunk(token_ids=[5], start=0, block_table=[0]))
"""


def test_a_thread_that_cannot_wait_for_a_round_ends_the_process() -> None:
    """The caller's would wait for it without end."""
    result = subprocess.run(
        [sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 1
    assert "decoder_thread_failed" in result.stdout + result.stderr

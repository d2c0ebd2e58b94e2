"""What answers tasks: Tandem's services, llama.cpp's server, OpenVINO GenAI."""

import asyncio
import contextlib
import http.client
import importlib
import json
import subprocess
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.services import ServiceError, start_process
from benchmarks.workloads import Task
from tandem.client import AsyncTandemClient, GenerationRequest, SpeculationParams
from tandem.free_ports import free_port

STREAMS = 8
_CONTEXT_PER_STREAM = 1024
_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Output tokens, and how many steps of the model they took; 0: it does not say."""

    token_ids: Sequence[int]
    num_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Answers tasks, greedily."""

    name: str
    ask: Callable[[Task], Awaitable[Answer]]
    max_streams: int = STREAMS
    # By task's kind, of the last turn.
    answers: dict[str, list[Answer]] = field(default_factory=dict)

    async def run(self, kind: str, tasks: Sequence[Task], streams: int) -> float:
        """Answers all tasks, so many at a time; returns output tokens per second."""
        waiting = list(enumerate(tasks))[::-1]
        answers: dict[int, Answer] = {}

        async def one_stream() -> None:
            while waiting:
                index, task = waiting.pop()
                answers[index] = await self.ask(task)

        started_s = time.perf_counter()
        await asyncio.gather(*(one_stream() for _ in range(streams)))
        duration_s = time.perf_counter() - started_s
        self.answers[kind] = [answers[index] for index in range(len(tasks))]
        return sum(len(answer.token_ids) for answer in answers.values()) / duration_s


def tandem_server(name: str, client: AsyncTandemClient, speculation: SpeculationParams) -> Server:
    async def ask(task: Task) -> Answer:
        generation = await client.generate(
            GenerationRequest(
                prompt=task.prompt_token_ids,
                max_new_tokens=task.max_new_tokens,
                speculation=speculation,
            )
        )
        return Answer(token_ids=generation.token_ids, num_steps=generation.usage.num_steps)

    return Server(name=name, ask=ask)


@contextlib.contextmanager
def llama_server(
    name: str, program: str, model: Path, threads: int, flags: Sequence[str] = ()
) -> Iterator[tuple[Server, subprocess.Popen[str]]]:
    """Runs llama.cpp's server, and yields its process, too.

    Raises:
        ServiceError: it ended before it was ready.
    """
    port = free_port()
    command = [
        *(program, "--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", str(threads), "--threads-batch", str(threads), "--log-disable"),
        *("--parallel", str(STREAMS), "--ctx-size", str(STREAMS * _CONTEXT_PER_STREAM), *flags),
    ]
    pool = ThreadPoolExecutor(max_workers=STREAMS)

    def post(task: Task) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        body = {
            "prompt": list(task.prompt_token_ids),
            "n_predict": task.max_new_tokens,
            "temperature": 0,
            "cache_prompt": False,
            "return_tokens": True,
        }
        headers = {"content-type": "application/json"}
        with contextlib.closing(connection):
            connection.request("POST", "/completion", json.dumps(body), headers)
            answer = json.loads(connection.getresponse().read())
        if "tokens" not in answer:
            raise ServiceError(f"llama-server: {answer}")
        return Answer(token_ids=answer["tokens"])

    async def ask(task: Task) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(pool, post, task)

    with pool, start_process(command, subprocess.DEVNULL) as process:
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", process)
            yield Server(name=name, ask=ask), process
        finally:
            process.terminate()


def _wait_for(url: str, process: subprocess.Popen[str]) -> None:
    """Until it is answered."""
    end_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < end_s and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1):
            return
        time.sleep(0.02)
    raise ServiceError(f"{url} is not answered; the process's status is {process.poll()}")


def openvino_server(name: str, model: Path, threads: int, num_drafts: int) -> Server:
    """OpenVINO GenAI in this process, one task at a time.

    Args:
        num_drafts: of its prompt lookup; 0: without.
    """
    genai: Any = importlib.import_module("openvino_genai")
    openvino: Any = importlib.import_module("openvino")
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    lookup = {"prompt_lookup": True} if num_drafts else {}
    pipeline = genai.LLMPipeline(
        str(model), "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads, **lookup
    )

    def generate(task: Task) -> Answer:
        config = pipeline.get_generation_config()
        config.max_new_tokens = task.max_new_tokens
        config.do_sample = False
        if num_drafts:
            config.num_assistant_tokens = num_drafts
            config.max_ngram_size = 3
        prompt = openvino.Tensor(np.array([task.prompt_token_ids], dtype=np.int64))
        return Answer(token_ids=list(pipeline.generate(prompt, config).tokens[0]))

    async def ask(task: Task) -> Answer:
        return await asyncio.to_thread(generate, task)

    return Server(name=name, ask=ask, max_streams=1)

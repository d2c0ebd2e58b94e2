"""What pools bring a real model: the same requests with their own text alone, and with a pool.

    make real-model
    python -m benchmarks.real.pools [--json FILE] [--quick]

loaded     files of a package go on as they begin, with the package's other files in the pool
written    the same, of a model that writes the files as they are: on the drafter alone, 7 drafts
           a step at most
reworded   edits of a function are asked for in other words, with earlier answers in the pool
agent      a file is given back after each of five failed tests, with earlier answers in the pool
turns      a conversation of four edits, whose prompts hold the earlier answers themselves

Greedy, one stream. Both run each request, by turns. Tokens per second count from the first token
on; "same" counts equal answers.
"""

import argparse
import asyncio
import itertools
import random
import shutil
import string
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from inspect import getsource
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.arguments import command_parser, write_figures
from benchmarks.real.tasks import CODE_CHARACTERS
from benchmarks.report import table
from benchmarks.services import running_process, running_stack
from benchmarks.workloads import REAL_MODEL
from gateway.text.chat_template import ChatTemplate
from servicekit.gguf.folder import model_folder
from servicekit.logs import configure_logs
from tandem.client import (
    AsyncTandemClient,
    Chunk,
    DrafterClient,
    Generation,
    GenerationRequest,
    Keep,
    NgramParams,
    SpeculationParams,
)
from tandem.generation import EventCollector

_PACKAGE = Path(sysconfig.get_path("stdlib")) / "asyncio"
_BEGUN_CHARACTERS = 1500
# Of so many files, the first is not.
_LOADED_OF = 4
_DEPTH = 7
_FUNCTIONS: tuple[Callable[..., object], ...] = (
    shutil.copyfileobj,
    textwrap.indent,
    random.Random.shuffle,
    string.capwords,
)
_WORDINGS = (
    "Add type hints to this code, and give back the whole code:",
    "Please add type hints to the following code and return all of it.",
    "Type hints are missing here. Give back the whole code with them:",
)
_TURNS = (
    _WORDINGS[0],
    "Now add a docstring, and give back the whole code.",
    "Now rename the function to `work`, and give back the whole code.",
    "Now undo the renaming, and give back the whole code.",
)


class Comparison:
    """One kind of requests, without a pool and with one."""

    def __init__(self, client: AsyncTandemClient, pool: str, *, max_new_tokens: int) -> None:
        self._client = client
        self._max_new_tokens = max_new_tokens
        pooled = SpeculationParams(pool=pool, pool_keep="nothing" if pool == "loaded" else None)
        self._variants = [SpeculationParams(), pooled]
        self._answers: list[list[Generation]] = [[], []]
        self._seconds = [0.0, 0.0]

    async def ask(self, prompt: str) -> str:
        """The answer; whoever runs first does so second the next time."""
        order = (0, 1) if len(self._answers[0]) % 2 else (1, 0)
        for index in order:
            request = GenerationRequest(
                prompt=prompt,
                max_new_tokens=self._max_new_tokens,
                speculation=self._variants[index],
            )
            collector = EventCollector()
            begun_s = 0.0
            async for event in self._client.stream(request):
                collector.add(event)
                if isinstance(event, Chunk):
                    begun_s = begun_s or time.perf_counter()
            self._seconds[index] += time.perf_counter() - begun_s
            self._answers[index].append(collector.generation())
        return self._answers[0][-1].text

    def row(self, kind: str) -> dict[str, object]:
        own, pooled = self._answers
        pairs = zip(own, pooled, strict=True)
        return {
            "kind": kind,
            "tokens per step, own text": f"{_tokens_per_step(own):.2f}",
            "with the pool": f"{_tokens_per_step(pooled):.2f}",
            "drafts of the pool": sum(each.usage.num_pool_drafts for each in pooled),
            "tokens/s, ratio": f"{self._seconds[0] / self._seconds[1]:.2f}",
            "same": f"{sum(a.token_ids == b.token_ids for a, b in pairs)}/{len(own)}",
        }


def _written(model: Path, texts: Sequence[str], *, num_tokens: int) -> dict[str, object]:
    """Tokens per step of the texts that are not loaded, as long as they are."""
    tokenizer = Tokenizer.from_file(str(model_folder(model) / "tokenizer.json"))
    files = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    num_steps, num_decided = [0, 0], 0
    with running_process("drafter") as service, DrafterClient(service.address) as drafter:
        for index, token_ids in enumerate(files):
            if index % _LOADED_OF:
                loaded = drafter.open(params=NgramParams(pool_id="loaded", algorithm="kmp"))
                drafter.propose(loaded, token_ids, max_draft_tokens=0)
                drafter.release(loaded, keep=Keep.ALL)
        for token_ids in files[::_LOADED_OF]:
            first = len(token_ids) // 4
            until = min(len(token_ids), first + num_tokens)
            num_decided += until - first
            for index, pool_id in enumerate(("", "loaded")):
                params = NgramParams(pool_id=pool_id, tie="longest")
                sequence, length = drafter.open(params=params), first
                while length < until:
                    draft = drafter.propose(sequence, token_ids[:length], max_draft_tokens=_DEPTH)
                    right = zip(draft.token_ids, token_ids[length:until], strict=False)
                    length += 1 + sum(
                        1 for _ in itertools.takewhile(lambda two: two[0] == two[1], right)
                    )
                    num_steps[index] += 1
    return {
        "kind": "written",
        "tokens per step, own text": f"{num_decided / num_steps[0]:.2f}",
        "with the pool": f"{num_decided / num_steps[1]:.2f}",
        "drafts of the pool": "",
        "tokens/s, ratio": "",
        "same": "",
    }


def _tokens_per_step(answers: Sequence[Generation]) -> float:
    num_steps = sum(each.usage.num_steps for each in answers)
    return sum(each.usage.output_tokens for each in answers) / num_steps


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("real.pools", __doc__)
    parser.add_argument("--model", type=Path, default=REAL_MODEL, help="GGUF file")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of an answer")
    arguments = parser.parse_args(argv)
    rows = asyncio.run(_measure(arguments))
    print(table(rows))
    write_figures("real.pools", arguments, {"rows": rows})


async def _measure(arguments: argparse.Namespace) -> list[dict[str, object]]:
    template = ChatTemplate.load(model_folder(arguments.model))
    assert template is not None, "an instructed model has one"
    functions = _FUNCTIONS[: 1 if arguments.quick else None]
    codes = [textwrap.dedent(getsource(each))[:CODE_CHARACTERS] for each in functions]
    max_new_tokens = 8 if arguments.quick else arguments.max_new_tokens
    flags = ["--threads", "1"]
    rows = []
    texts = [text for path in sorted(_PACKAGE.glob("*.py")) if (text := path.read_text())]
    with running_stack(model=arguments.model, verifier_flags=flags) as gateway:
        async with AsyncTandemClient(gateway.address, retry=None) as client:
            for index, text in enumerate(texts):
                if index % _LOADED_OF:
                    await client.load_pool("loaded", text)

            async def compare(kind: str, dialogues: Sequence[Sequence[str]]) -> None:
                compared = Comparison(client, kind, max_new_tokens=max_new_tokens)
                for questions in dialogues:
                    messages: list[dict[str, str]] = []
                    for question in questions:
                        messages.append({"role": "user", "content": question})
                        answer = await compared.ask(template.render(messages))
                        messages.append({"role": "assistant", "content": answer})
                rows.append(compared.row(kind))

            begun = Comparison(client, "loaded", max_new_tokens=max_new_tokens)
            for text in texts[:: _LOADED_OF * (len(texts) if arguments.quick else 1)]:
                await begun.ask(text[:_BEGUN_CHARACTERS])
            rows.append(begun.row("loaded"))
            rows.append(_written(arguments.model, texts, num_tokens=4 * max_new_tokens))
            await compare("reworded", [[f"{ask}\n\n{code}"] for code in codes for ask in _WORDINGS])
            await compare("agent", [[each] for code in codes for each in _failures(code)])
            await compare("turns", [[f"{_TURNS[0]}\n\n{code}", *_TURNS[1:]] for code in codes])
    return rows


def _failures(code: str) -> Iterator[str]:
    for number in range(5):
        yield (
            f"You repair code until its tests pass. This is the file:\n\n{code}\n\n"
            f"Test run {number + 1} failed: line {10 + 3 * number}: TypeError: argument {number} "
            "has the wrong type. Give back the whole file, repaired, with type hints."
        )


if __name__ == "__main__":
    # stdout is the table's.
    configure_logs("warning", "benchmark")
    main()

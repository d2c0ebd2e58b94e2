"""The held-out texts for drafting policies, by kind.

    renames     rename tasks of the demo model's held-out file: prompt known, reference to generate
    source      Python's own test modules
    documents   Python's help topics: prose that shares little but words
    licences    of the packages pinned in constraints.txt, each text once: documents that resemble
                each other, like answers to one kind of question
    readmes     of the same packages: documents that do not
    copyrights  of the packages of Debian's base system, one text per package, with copies: some
                resemble each other, some do not

Except for renames, `KNOWN_TOKENS` are known and `CONTINUED_TOKENS` follow.
"""

import importlib.util
import json
import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.debian_copyrights import base_system_copyrights
from benchmarks.package_summaries import pinned_packages
from benchmarks.workloads import HELD_OUT

KNOWN_TOKENS = 1500
CONTINUED_TOKENS = 800
MAX_TEXTS = {
    "renames": 80,
    "source": 150,
    "documents": 19,
    "licences": 40,
    "readmes": 40,
    "copyrights": 80,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A text: its known tokens, and the model's output."""

    known_token_ids: Sequence[int]
    coming_token_ids: Sequence[int]


def held_out_texts(
    tokenizer: Tokenizer, *, debian: Path = Path("/")
) -> tuple[dict[str, list[Continuation]], list[str]]:
    """Returns the texts by kind, and notes on kinds that are not available here.

    Args:
        tokenizer: splits them into tokens.
        debian: the root of the Debian system with the copyrights.
    """
    texts: dict[str, list[Continuation]] = {"renames": _renames(tokenizer)}
    notes = []
    source = _source_texts()
    if source:
        texts["source"] = _continuations(tokenizer, source, MAX_TEXTS["source"])
    else:
        notes.append(
            "source: this Python comes without its test folder; install it (on Debian: "
            "libpython3-testsuite) for these rows"
        )
    documents = sorted(pydoc_data.topics.topics.values(), key=len, reverse=True)
    texts["documents"] = _continuations(tokenizer, documents, MAX_TEXTS["documents"])
    by_kind, missing = _package_texts()
    for kind, found in by_kind.items():
        texts[kind] = _continuations(tokenizer, found, MAX_TEXTS[kind])
    if missing:
        notes.append(f"texts of {', '.join(missing)}: not installed in the pinned version")
    copyrights = base_system_copyrights(debian)
    if copyrights:
        texts["copyrights"] = _continuations(tokenizer, copyrights, MAX_TEXTS["copyrights"])
    else:
        notes.append("copyrights: dpkg keeps no packages here")
    for kind in list(texts):
        if not texts[kind]:
            notes.append(f"{kind}: no text here is long enough")
            del texts[kind]
    return texts, notes


def _renames(tokenizer: Tokenizer) -> list[Continuation]:
    tasks = [json.loads(line) for line in HELD_OUT.read_text().splitlines()[: MAX_TEXTS["renames"]]]
    return [
        Continuation(
            known_token_ids=tokenizer.encode(task["prompt"], add_special_tokens=False).ids,
            coming_token_ids=tokenizer.encode(task["reference"], add_special_tokens=False).ids,
        )
        for task in tasks
    ]


def _source_texts() -> list[str]:
    spec = importlib.util.find_spec("test")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    paths = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    # Spread over the folder, not the first by name.
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths[::3]]


def _package_texts() -> tuple[dict[str, list[str]], list[str]]:
    """Returns each text once, in the order of package names, and the packages without one."""
    licences: dict[str, None] = {}
    readmes: dict[str, None] = {}
    packages, missing = pinned_packages()
    for package in packages:
        for file in sorted(package.files or (), key=str):
            if file.parts[0].endswith(".dist-info"):
                if file.name == "METADATA":
                    readmes[file.read_text(encoding="utf-8")] = None
                elif "LICEN" in file.name.upper():
                    licences[file.read_text(encoding="utf-8")] = None
    return {"licences": list(licences), "readmes": list(readmes)}, missing


def _continuations(
    tokenizer: Tokenizer, texts: Sequence[str], most_texts: int
) -> list[Continuation]:
    found: list[Continuation] = []
    for text in texts:
        if len(found) == most_texts:
            break
        ids = tokenizer.encode(text[:40_000], add_special_tokens=False).ids
        if len(ids) >= KNOWN_TOKENS + CONTINUED_TOKENS:
            found.append(
                Continuation(
                    known_token_ids=ids[:KNOWN_TOKENS],
                    coming_token_ids=ids[KNOWN_TOKENS : KNOWN_TOKENS + CONTINUED_TOKENS],
                )
            )
    return found

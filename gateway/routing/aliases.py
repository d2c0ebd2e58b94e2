"""Names that stand for several models, such as a new one beside the old.

Owns which of them runs a request. Pure. Weighted rendezvous hashing (Schindler, Schomaker 2005): a
key keeps its model while that is served, and another weight moves no more keys than the shares say.
"""

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence

#: Weights of models, by their ids, by alias.
Aliases = Mapping[str, Mapping[str, int]]

#: Prompts that agree in this many characters go to one model.
PREFIX_CHARACTERS = 1024

_MAX_WEIGHT = 1_000_000


def parse_aliases(texts: Sequence[str]) -> Aliases:
    """The aliases of entries such as `chat=qwen3-8b:9`; those of one name make one alias.

    Raises:
        ValueError: an entry is none, or an alias has a model twice.
    """
    aliases: dict[str, dict[str, int]] = {}
    for text in texts:
        name, _, target = text.partition("=")
        # Ids of models may have colons.
        model_id, _, weight = target.rpartition(":")
        if not (name and model_id and weight.isascii() and weight.isdigit()):
            raise ValueError(f"{text!r} is not NAME=ID:WEIGHT")
        if not 1 <= int(weight) <= _MAX_WEIGHT:
            raise ValueError(f"{text!r}: the weight is not from 1 to {_MAX_WEIGHT}")
        if model_id in aliases.setdefault(name, {}):
            raise ValueError(f"{text!r}: {name} has {model_id} already")
        aliases[name][model_id] = int(weight)
    return aliases


def key_of(affinity_key: str, beginning: str) -> bytes:
    """The key of a request: the client's, or its prompt's beginning.

    Args:
        beginning: text that the requests of one conversation have in common.
    """
    text = f"key:{affinity_key}" if affinity_key else f"prompt:{beginning[:PREFIX_CHARACTERS]}"
    return text.encode(errors="surrogatepass")


def beginning_of_tokens(token_ids: Sequence[int]) -> str:
    """The beginning of a prompt that came as token ids."""
    return " ".join(map(str, token_ids[:256]))


def choose_model(weights: Mapping[str, int], key: bytes, served: Collection[str]) -> str:
    """The id of the model that runs a request.

    Args:
        weights: of the alias's models; not empty.
        key: see `key_of`.
        served: ids; of these, if there are any among the alias's.
    """
    candidates = [model_id for model_id in weights if model_id in served] or weights
    return max(candidates, key=lambda each: (_score(key, each, weights[each]), each))


def _score(key: bytes, model_id: str, weight: int) -> float:
    # The id keys the hash: a concatenation of key and id could be mistaken for another's.
    name = hashlib.blake2b(model_id.encode(), digest_size=16).digest()
    digest = hashlib.blake2b(key, digest_size=8, key=name).digest()
    uniform = (int.from_bytes(digest) + 0.5) / 2**64
    return -weight / math.log(uniform) if uniform < 1 else math.inf

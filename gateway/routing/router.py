"""Which verifier and which drafter a request goes to.

Owns the choice; pure. For verifiers, rendezvous hashing (Thaler, Ravishankar 1998) with bounded
loads (Mirrokni, Thorup, Zadimoghaddam 2018): equal keys go to the same verifier, so that its prefix
cache serves them; when a verifier comes or goes only its own keys move; and no verifier gets much
more than its share. For drafters, rendezvous hashing alone: each can carry many verifiers.
"""

import functools
import hashlib
import math
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence

#: Prompts that agree in this many tokens are worth sending to one verifier.
PREFIX_TOKENS = 256

#: No verifier carries more than this times the mean load, rounded up.
LOAD_FACTOR = 1.25


def affinity_of(affinity_key: str, prompt_token_ids: Sequence[int]) -> bytes:
    """The key that is hashed to find a verifier: the client's, or the prompt's beginning.

    It is short, however long these are: it is hashed once per verifier.
    """
    if affinity_key:
        return b"key:" + hashlib.blake2b(affinity_key.encode(), digest_size=16).digest()
    prefix = array("I", prompt_token_ids[:PREFIX_TOKENS]).tobytes()
    return b"prompt:" + hashlib.blake2b(prefix, digest_size=16).digest()


def choose_verifier(affinity: bytes, loads: Mapping[str, int], num_sequences: int) -> str:
    """The name of the verifier for a request of `num_sequences` choices.

    The highest-ranked one whose load stays within the bound; the highest-ranked of all if the
    request itself is larger than the bound.

    Args:
        affinity: see `affinity_of`.
        loads: by each verifier's name, which is stable over reconnects and gateways, the sequences
            that this gateway has there; not empty.
        num_sequences: how many the request adds.
    """
    bound = math.ceil(LOAD_FACTOR * (sum(loads.values()) + num_sequences) / len(loads))
    within = [name for name, load in loads.items() if load + num_sequences <= bound]
    return best(affinity, within or loads)


def choose_drafter(verifier: str, addresses: Collection[str]) -> str:
    """The address of the drafter for a verifier's sequences; "" if there are none.

    They share one, so that a step sends one message, however many drafters there are.

    Args:
        verifier: its name, which is its address; a drafter on its host is preferred.
        addresses: of the drafters.
    """
    host = _host_of(verifier)
    near = [address for address in addresses if _host_of(address) == host]
    return best(verifier.encode(), near or addresses)


def best(key: bytes, names: Iterable[str]) -> str:
    """The first of the names, in an order that depends on the key and on each name alone; "" if
    there are none.
    """
    return max(names, key=lambda name: (_weight(key, name), name), default="")


def _host_of(address: str) -> str:
    return address.rpartition(":")[0]


def _weight(key: bytes, name: str) -> bytes:
    # The name keys the hash: a concatenation of key and name could be mistaken for another's.
    return hashlib.blake2b(key, digest_size=8, key=_name_key(name)).digest()


@functools.lru_cache(maxsize=4096)
def _name_key(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()

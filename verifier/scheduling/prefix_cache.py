"""Maps prefixes to the blocks with their K/V, so that a prefix is computed once.

The key of a block is its digest: BLAKE2b over the digest of the block before it and its own token
ids. The chain begins with the salt and the kind of rotary embedding, so equal digests mean equal
ones of both, and equal tokens from the first one on; a collision would break BLAKE2b, so tokens are
not compared. Only whole blocks of computed, verified tokens are entered.

A block that no sequence holds stays here, idle, until it is evicted, least recently used first.
Knows no tensor and no sequence.
"""

import array
import hashlib
from collections import OrderedDict

_DIGEST_BYTES = 32


def extend_digests(
    digests: list[bytes],
    token_ids: list[int],
    num_blocks: int,
    *,
    block_size: int,
    cache_salt: str,
    uses_long_rope: bool = False,
) -> None:
    """Appends the digests of a sequence's next whole blocks until there are `num_blocks`.

    Args:
        digests: of the first blocks of `token_ids`, under the same salt.
        uses_long_rope: as in `ScheduledTokens`.
    """
    digest = digests[-1] if digests else _root_digest(cache_salt, uses_long_rope)
    for start in range(len(digests) * block_size, num_blocks * block_size, block_size):
        content = array.array("I", token_ids[start : start + block_size]).tobytes()
        digest = hashlib.blake2b(digest + content, digest_size=_DIGEST_BYTES).digest()
        digests.append(digest)


class PrefixCache:
    """Owned by the block pool.

    Invariants: a digest has one block and a block one digest; the idle blocks are exactly the
    cached ones that no table holds, least recently used first.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        # A dict would walk over those that left before its first: some ms per step of a full cache.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Blocks that could be evicted."""
        return len(self._idle)

    def __contains__(self, block: int) -> bool:
        return block in self._digests

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def find(self, digests: list[bytes]) -> list[int]:
        """The blocks of the longest cached prefix."""
        found = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def add(self, digest: bytes, block: int) -> None:
        """Enters a held block. Of several with equal tokens only the first is cached."""
        if digest not in self._blocks:
            assert block not in self._digests, f"block {block} is cached as something else"
            self._blocks[digest] = block
            self._digests[block] = digest

    def retire(self, block: int) -> None:
        """Makes a block idle whose last holder has released it; it is the most recently used."""
        self._idle[block] = None

    def revive(self, block: int) -> None:
        """Makes an idle block a held one again."""
        del self._idle[block]

    def evict(self) -> int:
        """Removes the least recently used idle block; returns it."""
        block, _ = self._idle.popitem(last=False)
        del self._blocks[self._digests.pop(block)]
        return block

    def check_integrity(self, held: set[int]) -> None:
        """Asserts the invariants; `held` are the blocks that sequences hold."""
        assert len(self._blocks) == len(self._digests), "a block or a digest is entered twice"
        for digest, block in self._blocks.items():
            assert self._digests.get(block) == digest, f"block {block} has another digest"
        for block in self._digests:
            assert (block in held) != (block in self._idle), f"block {block} is held and idle"
        assert self._idle.keys() <= self._digests.keys(), "an idle block is not cached"


def _root_digest(cache_salt: str, uses_long_rope: bool) -> bytes:
    """The start of a salt's chains, hashed in its own domain so that no salt equals a block."""
    domain = b"long rope salt" if uses_long_rope else b"cache salt"
    return hashlib.blake2b(cache_salt.encode(), digest_size=_DIGEST_BYTES, person=domain).digest()

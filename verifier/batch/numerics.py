"""Padding rules that give a token's logits the same bits whatever else is in the batch.

Matrix products choose their kernels, and so their order of summation, by shape. Under `strict`
every shape is rounded up to one at which a row's bits are known not to depend on the shape. For CPU
(torch 2.13, float32 and bfloat16, AVX-512) these rules were found by trial and are held by tests,
with the libraries restricted to some of their kernels (`cpu_kernels.py`):

- the rows of every linear layer: a multiple of 8 (1 to 3 rows differ from wider products);
- the query rows of an attention call: a multiple of 8, for the same reason;
- its K/V length: attention works in chunks of 512, so whole chunks are exact; the last one may
  stop at a multiple of 16 while it is no longer than 192 (beyond, the product over K/V is split
  differently).

`fast` pads nothing.
"""

from dataclasses import dataclass

KV_CHUNK_TOKENS = 512
KV_SHORT_CHUNK_TOKENS = 192
KV_SHORT_MULTIPLE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """The padding rules of one mode; see `STRICT` and `FAST`."""

    name: str
    row_multiple: int
    pads_kv: bool

    def padded_rows(self, num_rows: int) -> int:
        return -(-num_rows // self.row_multiple) * self.row_multiple

    def padded_kv_length(self, kv_length: int) -> int:
        if not self.pads_kv:
            return kv_length
        whole = kv_length // KV_CHUNK_TOKENS * KV_CHUNK_TOKENS
        rest = kv_length - whole
        if rest > KV_SHORT_CHUNK_TOKENS:
            return whole + KV_CHUNK_TOKENS
        return whole + -(-rest // KV_SHORT_MULTIPLE) * KV_SHORT_MULTIPLE


STRICT = Numerics(name="strict", row_multiple=8, pads_kv=True)
FAST = Numerics(name="fast", row_multiple=1, pads_kv=False)
# Of the decoder of this project's own kernels, which needs no padding.
EXACT = Numerics(name="strict", row_multiple=1, pads_kv=False)

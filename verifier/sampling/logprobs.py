"""Logprobs of tokens, and the likeliest tokens of a row."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token's logprob and rank (1: the likeliest), and the n likeliest with theirs."""

    token_id: int
    logprob: float
    rank: int
    top: tuple["TokenLogprob", ...] = ()


def token_logprobs(
    logprobs: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> list[TokenLogprob]:
    """Logprob and rank of one token per row, and of the row's likeliest tokens.

    Args:
        logprobs: [R, V]. token_ids: [R]. num_top: how many of the likeliest; lower ids first among
            equals.
    """
    own = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    values, ids = _likeliest(logprobs, min(num_top, logprobs.shape[-1]))
    return [
        TokenLogprob(
            token_id=token_id,
            logprob=logprob,
            rank=rank,
            top=tuple(
                TokenLogprob(token_id=i, logprob=v, rank=r)
                for r, (i, v) in enumerate(zip(top_ids, top_values, strict=True), start=1)
            ),
        )
        for token_id, logprob, rank, top_ids, top_values in zip(
            token_ids.tolist(),
            own[:, 0].tolist(),
            ranks.tolist(),
            ids.tolist(),
            values.tolist(),
            strict=True,
        )
    ]


def _likeliest(logprobs: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids [R, num_top] of the largest of each row [R, V], lower ids first among equals.

    `topk` does not specify which of several equals it picks, and sorting whole rows is slow.
    """
    if num_top == 0:
        return logprobs[:, :0], logprobs[:, :0].long()
    smallest = logprobs.topk(num_top, dim=-1).values[:, -1:]
    is_above, is_equal = logprobs > smallest, logprobs == smallest
    num_equals = num_top - is_above.sum(dim=-1, keepdim=True)
    is_taken = is_above | (is_equal & (is_equal.cumsum(dim=-1) <= num_equals))
    ids = is_taken.nonzero()[:, 1].view(len(logprobs), num_top)
    values, order = logprobs.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)

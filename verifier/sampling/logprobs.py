"""Logprobs of tokens, and the likeliest tokens of a row."""

from tandem.values import TokenLogprob
from verifier.sampling.logits_processing import ReportedRows


def token_logprobs(rows: ReportedRows) -> list[TokenLogprob]:
    """Logprob and rank of one token per row, and of the row's likeliest tokens."""
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
            rows.token_ids.tolist(),
            rows.logprobs.tolist(),
            rows.ranks.tolist(),
            rows.top_token_ids.tolist(),
            rows.top_logprobs.tolist(),
            strict=True,
        )
    ]

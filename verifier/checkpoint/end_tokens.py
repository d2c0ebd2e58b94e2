"""The end token that a checkpoint's tokenizer names.

Many fine-tunes name the end of a turn there alone, and the base model's end token elsewhere. Knows
no tokenizer's rules: only the names and ids of its tokens.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from servicekit.logs import get_logger

logger = get_logger(__name__)


class _EndToken(NamedTuple):
    text: str
    token_id: int


def with_tokenizers_end_token(folder: Path, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The end tokens of a checkpoint: the configured ones, and `eos_token` of
    tokenizer_config.json. The log says if that is another one.

    Args:
        folder: whose files `check_files` has passed.
        eos_token_ids: of generation_config.json or config.json.
    """
    try:
        end_token = _tokenizers_end_token(folder)
    except FileNotFoundError:
        return eos_token_ids
    except (OSError, ValueError, RecursionError, TypeError, AttributeError, KeyError) as error:
        # Served all the same: who sends token ids needs no tokenizer.
        logger.warning("tokenizers_end_token_unknown", folder=str(folder), reason=str(error))
        return eos_token_ids
    if end_token is None or end_token.token_id in eos_token_ids:
        return eos_token_ids
    logger.info(
        "tokenizers_end_token",
        token=end_token.text,
        token_id=end_token.token_id,
        configured=sorted(eos_token_ids),
    )
    return eos_token_ids | {end_token.token_id}


def _tokenizers_end_token(folder: Path) -> _EndToken | None:
    """None: the tokenizer names none, or does not have it."""
    told = _read(folder / "tokenizer_config.json").get("eos_token")
    # With its properties, in files of older transformers.
    text = told.get("content") if isinstance(told, dict) else told
    if not isinstance(text, str):
        return None
    token_id = _id_of(text, _read(folder / "tokenizer.json"))
    is_id = type(token_id) is int and 0 <= token_id < 1 << 32
    return _EndToken(text, token_id) if is_id else None


def _id_of(text: str, tokenizer: dict[str, Any]) -> Any:
    """The id of a token in a tokenizer.json; None: there is no such token."""
    for added in tokenizer.get("added_tokens") or ():
        if added["content"] == text:
            return added["id"]
    vocab = tokenizer["model"]["vocab"]
    if isinstance(vocab, dict):
        return vocab.get(text)
    # Of a Unigram model: pairs of text and score.
    return next((index for index, (piece, _) in enumerate(vocab) if piece == text), None)


def _read(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return content

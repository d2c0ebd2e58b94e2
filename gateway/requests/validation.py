"""The rules that a request must keep whatever its model.

Owns every rule beyond the .proto files' own size limits, which have been checked before; errors
name the proto's field paths. Pure. `acceptance.py` holds the rules that need the model and the
prompt's tokens: a request that is wrong by itself is refused before any work is spent on it.
"""

from gateway.errors import InvalidRequestError, UnsupportedFieldError
from gateway.messages.request import GenerateRequest
from tandem.declared import FieldError, check_ranges
from tandem.values import SamplingParams, SpeculationParams, StructuredOutput

MAX_CHOICES = 16
MAX_PRIORITY = 2**31 - 1


def check_request(
    request: GenerateRequest, *, has_tokenizer: bool, allow_trace: bool = False
) -> None:
    """Refuses a request that no model can run.

    Raises:
        InvalidRequestError: a value is out of range.
        UnsupportedFieldError: a field asks for what this gateway cannot do (yet).
    """
    if request.unknown_field:
        raise UnsupportedFieldError(
            f"this version does not know field {request.unknown_field}",
            field=request.unknown_field,
        )
    if request.trace and not allow_trace:
        raise UnsupportedFieldError(
            "this server does not trace steps: --allow-trace", field="trace"
        )
    _check_prompt(request, has_tokenizer=has_tokenizer)
    if request.max_new_tokens is not None and request.max_new_tokens < 1:
        raise InvalidRequestError(
            "max_new_tokens must be at least 1, not 0", field="max_new_tokens"
        )
    _check_stops(request, has_tokenizer=has_tokenizer)
    if request.report_tokens and not has_tokenizer:
        raise UnsupportedFieldError("this server has no tokenizer", field="report_tokens")
    if request.num_choices is not None and not 1 <= request.num_choices <= MAX_CHOICES:
        raise InvalidRequestError(
            f"n must be from 1 to {MAX_CHOICES}, not {request.num_choices}", field="n"
        )
    if not -MAX_PRIORITY - 1 <= request.priority <= MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority must be a 32-bit integer, not {request.priority}", field="priority"
        )
    _check_parameters(request.sampling, "sampling.")
    _check_parameters(request.speculation, "speculation.")
    _check_grammar(request.sampling.structured_output)
    _check_pool(request.speculation)


def _check_prompt(request: GenerateRequest, *, has_tokenizer: bool) -> None:
    if request.text is not None or request.conversation is not None:
        if request.text == "":
            raise InvalidRequestError("the prompt is empty", field="text")
        if not has_tokenizer:
            raise UnsupportedFieldError(
                "this server has no tokenizer; send token ids", field="text"
            )
    elif request.prompt_token_ids is None:
        raise InvalidRequestError("there is no prompt; give text or tokens", field="prompt")
    elif not request.prompt_token_ids:
        raise InvalidRequestError("the prompt is empty", field="tokens.token_ids")


def _check_stops(request: GenerateRequest, *, has_tokenizer: bool) -> None:
    for index, stop in enumerate(request.stop_sequences):
        if not stop:
            raise InvalidRequestError(
                "a stop sequence must not be empty", field=f"stop_sequences[{index}]"
            )
    if request.stop_sequences and not has_tokenizer:
        raise UnsupportedFieldError("this server has no tokenizer", field="stop_sequences")


def _check_parameters(params: SamplingParams | SpeculationParams, path: str) -> None:
    try:
        check_ranges(params, path=path)
    except FieldError as error:
        raise InvalidRequestError(error.reason, field=error.field) from None


def _check_grammar(output: StructuredOutput | None) -> None:
    """Refuses one that is empty: verifiers check what is in one."""
    if output is not None and (
        output.json_schema is output.regex is output.choices is output.lark is None
    ):
        raise InvalidRequestError("names no grammar", field="sampling.structured_output")


def _check_pool(speculation: SpeculationParams) -> None:
    """Refuses what is said of a pool where there is none, or that contradicts itself."""
    for name, is_given in (
        ("pool_min_ngram", speculation.pool_min_ngram is not None),
        ("pool_keep", speculation.pool_keep is not None),
        ("pool_keep_cancelled", speculation.pool_keep_cancelled),
    ):
        if is_given and not speculation.pool:
            raise InvalidRequestError(f"{name} needs a pool", field=f"speculation.{name}")
    if speculation.pool_keep_cancelled and speculation.pool_keep == "nothing":
        raise InvalidRequestError(
            "pool_keep_cancelled contradicts pool_keep KEEP_NOTHING",
            field="speculation.pool_keep_cancelled",
        )

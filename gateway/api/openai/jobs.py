"""From a parsed request to what is needed to run it and to write its answer.

Owns which requests of the gateway a body stands for, and the choices of its answer. A job keeps
nothing of the body that the answer does not need: an answer may take long.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from gateway.api.openai.errors import ApiError
from gateway.api.openai.reading import chat, requests, schema, tools
from gateway.api.openai.responses import conversion
from gateway.api.openai.responses.answer import ResponseAnswer
from gateway.api.openai.responses.schema import ResponsesRequest
from gateway.api.openai.writing.answers import Answer, ChatForm, ChunkAnswer, CompletionForm, Form
from gateway.api.openai.writing.choices import ChatChoice, Choice, CompletionChoice, Wants
from gateway.messages.request import GenerateRequest
from gateway.text.model_text import ModelText
from gateway.text.sampling_defaults import NO_DEFAULTS
from servicekit import logs
from tandem.values import SamplingDefaults, StructuredOutput


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request, ready to run.

    Attributes:
        requests: one per prompt; emptied when they begin to run.
        choices: all choices of the first prompt, then those of the next.
        num_prompts: of them.
        is_stream: whether the answer comes in events.
        renamed_params: by the usual name of a parameter in errors, the name in this request:
            prompt -> messages; and by `name/code` where it differs for errors of this code.
        has_prediction: whether the client told what the answer may repeat.
    """

    answer: Answer
    requests: list[GenerateRequest]
    choices: Sequence[Choice]
    num_prompts: int
    is_stream: bool
    renamed_params: Mapping[str, str] = dataclasses.field(default_factory=dict)
    has_prediction: bool = False

    def index_of(self, prompt_index: int, choice_index: int) -> int:
        """A choice's index in the answer."""
        return prompt_index * self.num_choices + choice_index

    @property
    def num_choices(self) -> int:
        """Of each prompt."""
        return len(self.choices) // self.num_prompts

    def choices_of(self, prompt_index: int) -> Sequence[Choice]:
        """Those of one prompt."""
        first = self.index_of(prompt_index, 0)
        return self.choices[first : first + self.num_choices]

    def take_requests(self) -> Iterator[GenerateRequest]:
        """The requests, which the job forgets one by one."""
        self.requests.reverse()
        while self.requests:
            yield self.requests.pop()


def completion_job(
    parsed: schema.CompletionRequest, *, text: ModelText | None, allows_trace: bool
) -> Job:
    """The job of a request for completions.

    Args:
        text: the model's; None: its tokenizer is unknown.
        allows_trace: whether a report of the drafts may hold those that were rejected.

    Raises:
        ApiError: some of its parameters do not go together.
    """
    if parsed.echo and parsed.logprobs is not None and (parsed.n or 1) > 1:
        raise ApiError(
            400,
            "echo with logprobs is not supported with n > 1",
            param="n",
            code="unsupported_parameter",
        )
    wants = Wants(
        logprobs=parsed.logprobs is not None,
        token_ids=bool(parsed.return_token_ids),
        report=_wants_report(parsed),
    )
    prompts = requests.prompts_of(parsed)
    num_choices = len(prompts) * (parsed.n or 1)
    return Job(
        answer=_answer(CompletionForm(), parsed, num_choices),
        requests=requests.completion_requests(
            parsed,
            prompts,
            defaults=_defaults(text),
            trace=wants.report and allows_trace,
            report_tokens=wants.report and text is not None,
        ),
        choices=[
            CompletionChoice(
                wants,
                echoes=bool(parsed.echo),
                # Not kept while it is not shown.
                prompt=prompt if isinstance(prompt, str) and parsed.echo else None,
            )
            for prompt in prompts
            for _ in range(parsed.n or 1)
        ],
        num_prompts=len(prompts),
        is_stream=bool(parsed.stream),
        renamed_params={"structured_outputs": _param_of_grammar(parsed, None)},
    )


def chat_job(
    parsed: schema.ChatCompletionRequest,
    *,
    is_served: bool,
    text: ModelText | None,
    num_bytes: int,
    allows_trace: bool,
    tells_logprobs_apart: bool = False,
) -> Job:
    """The job of a request for a chat completion.

    Args:
        is_served: whether the model is. If not, running the job refuses it, and a call that must
            come is not looked at.
        text, allows_trace: as above.
        num_bytes: of the body.
        tells_logprobs_apart: whether those of tool calls are told from those of text.

    Raises:
        ApiError: some of its parameters do not go together, or are not the template's business.
    """
    reads_calls = text is not None and (text.tool_call_form is not None or text.has_channels)
    has_tools = bool(tools.callable_tools(parsed))
    wants = Wants(
        logprobs=bool(parsed.logprobs),
        token_ids=bool(parsed.return_token_ids),
        report=_wants_report(parsed),
        parts=tells_logprobs_apart and bool(parsed.logprobs and reads_calls and has_tools),
    )
    grammar = tools.forced_call(parsed, text) if is_served else None
    request = requests.chat_request(
        parsed,
        chat.conversation(parsed, num_bytes=num_bytes),
        defaults=_defaults(text),
        grammar=grammar,
        trace=wants.report and allows_trace,
        report_tokens=wants.report and text is not None,
    )
    return Job(
        answer=_answer(ChatForm(), parsed, parsed.n or 1),
        requests=[request],
        choices=[
            ChatChoice(wants, has_one_call=parsed.parallel_tool_calls is False)
            for _ in range(parsed.n or 1)
        ],
        num_prompts=1,
        is_stream=bool(parsed.stream),
        renamed_params={
            "prompt": "messages",
            "structured_outputs": _param_of_grammar(parsed, grammar),
            # What is wrong in the grammar of a call is wrong in a tool.
            **({} if grammar is None else {"structured_outputs/invalid_value": "tools"}),
            "logprobs": "logprobs" if parsed.top_logprobs is None else "top_logprobs",
            **({} if parsed.prediction is None else {"speculation.prediction": "prediction"}),
        },
        has_prediction=parsed.prediction is not None,
    )


def response_job(
    parsed: ResponsesRequest, *, is_served: bool, text: ModelText | None, num_bytes: int
) -> Job:
    """The job of a request for a response: that of a chat completion, answered otherwise.

    Args:
        is_served, text, num_bytes: as above.

    Raises:
        ApiError: as above.
    """
    try:
        job = chat_job(
            conversion.to_chat(parsed),
            is_served=is_served,
            text=text,
            num_bytes=num_bytes,
            allows_trace=False,
            tells_logprobs_apart=True,
        )
    except ApiError as error:
        raise conversion.renamed(error) from None
    names = conversion.RENAMED_PARAMS
    return dataclasses.replace(
        job,
        answer=ResponseAnswer(
            parsed, sampling=job.requests[0].sampling, request_id=logs.request_id()
        ),
        renamed_params={
            **names,
            **{usual: names.get(param, param) for usual, param in job.renamed_params.items()},
        },
    )


def _defaults(text: ModelText | None) -> SamplingDefaults:
    return NO_DEFAULTS if text is None else text.sampling_defaults


def _param_of_grammar(
    parsed: schema.CompletionRequest | schema.ChatCompletionRequest,
    forced_call: StructuredOutput | None,
) -> str:
    """Which parameter asks for the output's grammar."""
    if forced_call is not None:
        return "tool_choice"
    return "response_format" if parsed.structured_outputs is None else "structured_outputs"


def _wants_report(parsed: schema.CompletionRequest | schema.ChatCompletionRequest) -> bool:
    wants = parsed.speculation is not None and bool(parsed.speculation.report)
    if wants and not parsed.stream:
        raise ApiError(
            400,
            "speculation.report needs stream: true",
            param="speculation.report",
            code="invalid_value",
        )
    return wants


def _answer(
    form: Form, parsed: schema.CompletionRequest | schema.ChatCompletionRequest, num_choices: int
) -> Answer:
    options = parsed.stream_options
    if options is not None and not parsed.stream:
        raise ApiError(
            400,
            "stream_options needs stream: true",
            param="stream_options",
            code="invalid_value",
        )
    includes_usage = options is not None and bool(options.include_usage)
    return ChunkAnswer(
        form,
        request_id=logs.request_id(),
        model=parsed.model,
        num_choices=num_choices,
        is_stream=bool(parsed.stream),
        includes_usage=includes_usage,
        repeats_usage=includes_usage
        and options is not None
        and bool(options.continuous_usage_stats),
    )

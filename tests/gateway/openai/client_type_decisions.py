"""What the official client allows: what asks for nothing, what is refused, and why."""

from collections.abc import Mapping

_ACCOUNTS = "OpenAI's service keeps account of it"


_CACHE = "K/V stays in the prefix cache while there is room, with or without it"


_DEFAULT = "the default"


_NOTED = "a server noted it of an answer that is sent back"


_SAME_TEXT = "the text is the same as a string"


_SCHEMA = "the output follows the schema, whatever is said of it"


_COMMON_IGNORED = {
    "metadata": _ACCOUNTS,
    "safety_identifier": _ACCOUNTS,
    "prompt_cache_options$": _CACHE,
    "prompt_cache_options.mode": _CACHE,
    "prompt_cache_options.ttl": _CACHE,
    "prompt_cache_retention": _CACHE,
    "parallel_tool_calls=True": _DEFAULT,
    "service_tier='auto'": _DEFAULT,
    "service_tier='default'": _DEFAULT,
    "store=False": _DEFAULT,
    "tool_choice='auto'": _DEFAULT,
}


_STREAM_IGNORED = {
    "stream=False": _DEFAULT,
    "stream_options$": _DEFAULT,
    "stream_options.include_obfuscation=False": _DEFAULT,
}


_STREAM_REFUSED = {"stream_options.include_obfuscation=True": "nothing hides the sizes of chunks"}


_OTHER_SERVICE = "no part of what this server does"


_DEPRECATED = "functions are tools by now"


_NO_MEDIA = "text is all that the models read and write"


_NO_STORE = "nothing is stored"


_NO_SUCH_TOOLS = "functions are all that a model may call"


IGNORED: Mapping[str, Mapping[str, str]] = {
    "/v1/completions": {
        **_STREAM_IGNORED,
        "best_of=1": _DEFAULT,
        "stream_options.include_usage=False": _DEFAULT,
        "echo=False": _DEFAULT,
    },
    "/v1/chat/completions": {
        **_COMMON_IGNORED,
        **_STREAM_IGNORED,
        **{
            f"{place}.content[]<text>{field}": reason
            for place in (
                "messages[]<developer>",
                "messages[]<system>",
                "messages[]<user>",
                "messages[]<assistant>",
                "messages[]<tool>",
                "prediction<content>",
            )
            for field, reason in (("$", _SAME_TEXT), (".prompt_cache_breakpoint", _CACHE))
        },
        "function_call='none'": _DEFAULT,
        "function_call='auto'": _DEFAULT,
        "logprobs=False": _DEFAULT,
        "modalities[]='text'": _DEFAULT,
        "response_format<text>": _DEFAULT,
        "response_format<json_schema>.json_schema.description": _SCHEMA,
        "response_format<json_schema>.json_schema.name": _SCHEMA,
        "response_format<json_schema>.json_schema.strict": _SCHEMA,
        "stream_options.include_usage=False": _DEFAULT,
        "verbosity='medium'": _DEFAULT,
    },
    "/v1/responses": {
        **_COMMON_IGNORED,
        **_STREAM_IGNORED,
        "background=False": _DEFAULT,
        "include[]='code_interpreter_call.outputs'": "no answer has such items",
        "include[]='computer_call_output.output.image_url'": "no answer has such items",
        "include[]='file_search_call.results'": "no answer has such items",
        "include[]='message.input_image.image_url'": "no answer has such items",
        "include[]='web_search_call.action.sources'": "no answer has such items",
        "include[]='web_search_call.results'": "no answer has such items",
        "include[]='reasoning.encrypted_content'": "the answer has the reasoning as text",
        "input[]<user>.content[]<input_text>$": _SAME_TEXT,
        "input[]<user>.content[]<input_text>.prompt_cache_breakpoint": _CACHE,
        "input[]<user>.phase": _NOTED,
        "input[]<user>.status": _NOTED,
        "input[]<user>.type='message'": _DEFAULT,
        "input[]<message>.content[]<refusal>$": "the text is the same as one that is no refusal",
        "input[]<message>.content[]<output_text>.annotations": _NOTED,
        "input[]<message>.content[]<output_text>.logprobs": _NOTED,
        "input[]<message>.id": _NOTED,
        "input[]<message>.phase": _NOTED,
        "input[]<message>.status": _NOTED,
        "input[]<function_call>.async=False": _DEFAULT,
        "input[]<function_call>.caller<direct>": _DEFAULT,
        "input[]<function_call>.id": _NOTED,
        "input[]<function_call>.status": _NOTED,
        "input[]<function_call_output>.caller<direct>": _DEFAULT,
        "input[]<function_call_output>.id": _NOTED,
        "input[]<function_call_output>.output[]<input_text>$": _SAME_TEXT,
        "input[]<function_call_output>.output[]<input_text>.prompt_cache_breakpoint": _CACHE,
        "input[]<function_call_output>.status": _NOTED,
        "input[]<reasoning>.encrypted_content": "it is another service's",
        "input[]<reasoning>.id": _NOTED,
        "input[]<reasoning>.status": _NOTED,
        "input[]<reasoning>.summary": "templates take the reasoning itself",
        "max_tool_calls": "it limits tools that the server runs, and there are none",
        "prompt_cache_options.prewarm=False": _DEFAULT,
        "reasoning$": _DEFAULT,
        "reasoning.context='auto'": _DEFAULT,
        "reasoning.generate_summary": "no answer has a summary",
        "reasoning.mode='standard'": _DEFAULT,
        "reasoning.summary": "no answer has a summary",
        "text$": _DEFAULT,
        "text.format<text>": _DEFAULT,
        "text.format<json_schema>.description": _SCHEMA,
        "text.format<json_schema>.name": _SCHEMA,
        "text.format<json_schema>.strict": _SCHEMA,
        "text.verbosity='medium'": _DEFAULT,
        "tools[]<function>.allowed_callers[]='direct'": _DEFAULT,
        "tools[]<function>.async=False": _DEFAULT,
        "tools[]<function>.defer_loading=False": _DEFAULT,
        "tools[]<function>.strict": "a call that must come follows its schema anyway",
        "truncation='disabled'": _DEFAULT,
    },
}


_COMMON_REFUSED = {
    "moderation": _OTHER_SERVICE,
    "service_tier='fast'": _OTHER_SERVICE,
    "service_tier='flex'": _OTHER_SERVICE,
    "service_tier='priority'": _OTHER_SERVICE,
    "service_tier='scale'": _OTHER_SERVICE,
    "store=True": _NO_STORE,
    "tool_choice<allowed_tools>": "leave out the other tools",
    "tool_choice<custom>": _NO_SUCH_TOOLS,
    "tools[]<custom>": _NO_SUCH_TOOLS,
}


_ITEMS = (
    "additional_tools apply_patch_call apply_patch_call_output code_interpreter_call compaction "
    "compaction_trigger computer_call computer_call_output configuration_update custom_tool_call "
    "custom_tool_call_output file_search_call image_generation_call local_shell_call "
    "local_shell_call_output mcp_approval_request mcp_approval_response mcp_call mcp_list_tools "
    "program program_output shell_call shell_call_output tool_search_call tool_search_output "
    "web_search_call"
)


_TOOLS = (
    "apply_patch code_interpreter computer computer_use_preview file_search image_generation "
    "local_shell mcp namespace programmatic_tool_calling shell tool_search web_search "
    "web_search_preview"
)


REFUSED: Mapping[str, Mapping[str, str]] = {
    "/v1/completions": {
        **_STREAM_REFUSED,
        "best_of=2": "n choices are all that are made",
        "prompt=None": "there is nothing to continue",
        "suffix": "models are not asked to fill in",
    },
    "/v1/chat/completions": {
        **_COMMON_REFUSED,
        **_STREAM_REFUSED,
        "audio": _NO_MEDIA,
        "function_call": _DEPRECATED,
        "functions": _DEPRECATED,
        "messages[]<assistant>.audio": _NO_MEDIA,
        "messages[]<assistant>.function_call": _DEPRECATED,
        "messages[]<assistant>.tool_calls[]<custom>": _NO_SUCH_TOOLS,
        "messages[]<function>": _DEPRECATED,
        "messages[]<user>.content[]<file>": _NO_MEDIA,
        "messages[]<user>.content[]<image_url>": _NO_MEDIA,
        "messages[]<user>.content[]<input_audio>": _NO_MEDIA,
        "modalities[]='audio'": _NO_MEDIA,
        "verbosity='high'": "no model is told",
        "verbosity='low'": "no model is told",
        "web_search_options": _OTHER_SERVICE,
    },
    "/v1/responses": {
        **_COMMON_REFUSED,
        **_STREAM_REFUSED,
        **{f"input[]<{kind}>": "no answer has such items" for kind in _ITEMS.split()},
        **{f"tools[]<{kind}>": _NO_SUCH_TOOLS for kind in _TOOLS.split()},
        "access_programs": _OTHER_SERVICE,
        "background=True": _NO_STORE,
        "background_options": _NO_STORE,
        "context_management": "nothing is left out of a conversation",
        "conversation": _NO_STORE,
        "image": _NO_MEDIA,
        "input[]$": "a reference to an item: " + _NO_STORE,
        "input[].id": "a reference to an item: " + _NO_STORE,
        "input[].type": "a reference to an item: " + _NO_STORE,
        "input[]<function_call>.async=True": "no tool runs beside its model",
        "input[]<function_call>.caller<program>": _NO_SUCH_TOOLS,
        "input[]<function_call>.namespace": _NO_SUCH_TOOLS,
        "input[]<function_call_output>.call_id=None": "templates need it",
        "input[]<function_call_output>.caller<program>": _NO_SUCH_TOOLS,
        "input[]<function_call_output>.namespace": _NO_SUCH_TOOLS,
        "input[]<function_call_output>.output[]<input_file>": _NO_MEDIA,
        "input[]<function_call_output>.output[]<input_image>": _NO_MEDIA,
        "input[]<user>.content[]<input_file>": _NO_MEDIA,
        "input[]<user>.content[]<input_image>": _NO_MEDIA,
        "previous_response_id": _NO_STORE,
        "prompt": _NO_STORE,
        "prompt_cache_options.comparison_response_id": _NO_STORE,
        "prompt_cache_options.prewarm=True": "an answer is always made",
        "reasoning.context='all_turns'": "the chat template decides it",
        "reasoning.context='current_turn'": "the chat template decides it",
        "reasoning.mode='pro'": _OTHER_SERVICE,
        "reasoning.mode='x'": _OTHER_SERVICE,
        "reasoning.mode='y'": _OTHER_SERVICE,
        "service_tier='ultrafast'": _OTHER_SERVICE,
        "text.verbosity='high'": "no model is told",
        "text.verbosity='low'": "no model is told",
        "tool_choice<apply_patch>": _NO_SUCH_TOOLS,
        "tool_choice<file_search>": _NO_SUCH_TOOLS,
        "tool_choice<mcp>": _NO_SUCH_TOOLS,
        "tool_choice<programmatic_tool_calling>": _NO_SUCH_TOOLS,
        "tool_choice<shell>": _NO_SUCH_TOOLS,
        "tools[]<function>.allowed_callers[]='programmatic'": _NO_SUCH_TOOLS,
        "tools[]<function>.async=True": "no tool runs beside its model",
        "tools[]<function>.defer_loading=True": _NO_SUCH_TOOLS,
        "truncation='auto'": "nothing is left out of a conversation",
    },
}

"""The tokenizers of a gateway, each with what else its folder says of text.

Owns which of them serves a model: the one whose digest its verifiers report. Read-only.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gateway.text import sampling_defaults
from gateway.text.chat_template import ChatTemplate
from gateway.text.output import channel_reader
from gateway.text.output.tool_call_form import ToolCallForm, form_of_template
from gateway.text.reasoning import THINK, Tags, tags_of_template
from gateway.text.sampling_defaults import NO_DEFAULTS
from gateway.text.tokenizer import Tokenizer
from tandem.values import SamplingDefaults


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """What turns a model's text into tokens and back.

    Attributes:
        chat_template: None: it has none, and conversations are refused.
        tool_call_form: how the model writes its calls; None: unknown, and they stay text.
        reasoning: the tags of reasoning that is told from the answer; None: none is.
        has_channels: whether messages in channels are told apart (`channel_reader.py`).
        sampling_defaults: what requests over HTTP get that name no value.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None = None
    tool_call_form: ToolCallForm | None = None
    reasoning: Tags | None = None
    has_channels: bool = False
    sampling_defaults: SamplingDefaults = NO_DEFAULTS

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        tool_calls: str = "auto",
        reasoning: str = "auto",
        generation_config: str = "auto",
        on_ignored_default: Callable[[str, Any], None] = lambda name, value: None,
    ) -> "ModelText":
        """Loads a model's folder.

        Args:
            tool_calls: a value of `ToolCallForm`; `auto`: what its template teaches; `none`.
            reasoning: `think`: in the tags of `reasoning.py`; `auto`: if its template knows them;
                `none`.
            generation_config: `auto`: the model's own sampling defaults count; `none`.
            on_ignored_default: see `sampling_defaults.load`.

        Raises:
            TokenizerLoadError: it has no usable tokenizer.
            ChatTemplateError: it has a template that cannot be used.
            GenerationConfigError: its sampling defaults cannot be read.
        """
        template = ChatTemplate.load(folder)
        form: ToolCallForm | None = None
        if tool_calls == "auto" and template is not None:
            form = form_of_template(template.source_with_tools)
        elif tool_calls not in ("auto", "none"):
            form = ToolCallForm(tool_calls)
        tags = THINK if reasoning == "think" else None
        if reasoning == "auto" and template is not None:
            tags = tags_of_template(template.source_with_tools)
        has_channels = (
            template is not None
            and tool_calls == reasoning == "auto"
            and channel_reader.is_taught(template.source_with_tools)
        )
        shown = [
            *(form.tags if form is not None else ()),
            *(tags.tokens if tags is not None else ()),
        ]
        if has_channels:
            shown += channel_reader.TAGS
        defaults = NO_DEFAULTS
        if generation_config == "auto":
            defaults = sampling_defaults.load(folder, on_ignored=on_ignored_default)
        return cls(
            tokenizer=Tokenizer.load(folder, shown=shown),
            chat_template=template,
            tool_call_form=form,
            reasoning=tags,
            has_channels=has_channels,
            sampling_defaults=defaults,
        )


class SameTokenizerError(Exception):
    """Two folders have the same tokenizer, so a model's digest does not tell which is its own."""


class ModelTexts:
    """All of a gateway's; there may be none: token ids in, token ids out."""

    def __init__(self, texts: Sequence[ModelText]) -> None:
        """Takes them over.

        Raises:
            SameTokenizerError: two tokenizers have one digest.
        """
        self._by_digest = {each.tokenizer.digest: each for each in texts}
        if len(self._by_digest) < len(texts):
            raise SameTokenizerError

    @property
    def is_empty(self) -> bool:
        return not self._by_digest

    def find(self, tokenizer_digest: str) -> ModelText | None:
        """That of a model; None if there is none.

        Args:
            tokenizer_digest: as the model's verifiers report it; "" if they do not: then the only
                one is assumed to be the model's.
        """
        if not tokenizer_digest and len(self._by_digest) == 1:
            return next(iter(self._by_digest.values()))
        return self._by_digest.get(tokenizer_digest)

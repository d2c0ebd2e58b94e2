"""The flags for the drafts of a request, of `tandem generate` and the quickstart.

Owns their names. Their meaning is that of `protos/tandem/v1/sampling.proto`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from tandem.values import SpeculationParams

_PANEL = "Speculation: changes the speed, never the output"


def _flag(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_PANEL, show_default=False, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationFlags:
    """One flag for each field of `SpeculationParams`."""

    no_speculation: Annotated[bool, _flag("--no-speculation", help="make no drafts")] = False
    preset: Annotated[
        Literal["tandem", "vllm-kmp", "vllm", "transformers"] | None,
        _flag(help="draft as this known drafter; other flags override it"),
    ] = None
    num_speculative_tokens: Annotated[
        int | None, _flag(metavar="K", help="maximum drafts verified per step")
    ] = None
    prompt_lookup_min: Annotated[int | None, _flag(metavar="N", help="shortest n-gram matched")] = (
        None
    )
    prompt_lookup_max: Annotated[int | None, _flag(metavar="N", help="longest n-gram matched")] = (
        None
    )
    algorithm: Annotated[
        Literal["index", "kmp"] | None,
        _flag(
            help="find matches by a hash index or a Knuth-Morris-Pratt scan; the drafts are the "
            "same"
        ),
    ] = None
    overlap: Annotated[
        Literal["disjoint", "allowed"] | None,
        _flag(help="whether a match may overlap the n-gram at the end"),
    ] = None
    tie: Annotated[
        Literal["earliest", "latest", "longest"] | None,
        _flag(help="which of several matches is continued"),
    ] = None
    tokens_per_match: Annotated[
        int | None,
        _flag(
            metavar="N",
            help="with --tie longest: drafts verified per token of the match; 0: no limit",
        ),
    ] = None
    hint_tokens: Annotated[
        int | None, _flag(metavar="N", help="maximum tokens that the drafter is asked for")
    ] = None
    pool: Annotated[str, _flag(metavar="NAME", help="draft from this pool, and feed it")] = ""
    pool_min_ngram: Annotated[
        int | None,
        _flag(
            metavar="N",
            help="ask the pool when the request's own match is shorter; 0: when there is none;"
            " with --tie longest: always",
        ),
    ] = None
    pool_keep: Annotated[
        Literal["nothing", "output", "all"] | None,
        _flag(help="part of this request's text that its pool gets (default: its output)"),
    ] = None
    pool_keep_cancelled: Annotated[
        bool,
        _flag(
            "--pool-keep-cancelled",
            help="feed the pool also if the request is cancelled or fails",
        ),
    ] = False

    def params(self) -> SpeculationParams:
        """The parameters that the flags set."""
        names = {field.name for field in dataclasses.fields(SpeculationParams)} - {"enabled"}
        return SpeculationParams(
            enabled=False if self.no_speculation else None,
            **{name: getattr(self, name) for name in names},
        )

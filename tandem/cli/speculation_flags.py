"""The flags for the drafts of a request, of `tandem generate` and the quickstart.

Owns their names. Their meaning is that of `protos/tandem/v1/sampling.proto`.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tandem.values import Preset, SpeculationParams

_PANEL = "Speculation: changes the speed, never the output"


def _flag(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_PANEL, show_default=False, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationFlags:
    """Of `SpeculationParams`, what is worth trying by hand."""

    no_speculation: Annotated[bool, _flag("--no-speculation", help="make no drafts")] = False
    preset: Annotated[
        Preset | None,
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
    prediction: Annotated[
        str, _flag(metavar="TEXT", help="text that the output may repeat: draft from it, too")
    ] = ""
    pool: Annotated[str, _flag(metavar="NAME", help="draft from this pool, and feed it")] = ""

    def params(self) -> SpeculationParams:
        """The parameters that the flags set."""
        return SpeculationParams(
            enabled=False if self.no_speculation else None,
            preset=self.preset,
            num_speculative_tokens=self.num_speculative_tokens,
            prompt_lookup_min=self.prompt_lookup_min,
            prompt_lookup_max=self.prompt_lookup_max,
            prediction=self.prediction,
            pool=self.pool,
        )

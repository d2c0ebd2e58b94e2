"""The flags for the drafts of a request, of `tandem generate` and the quickstart.

Owns their names. Their meaning is that of `protos/tandem/v1/sampling.proto`.
"""

import argparse
import dataclasses

from tandem.generation import SpeculationParams

PRESETS = ("tandem", "vllm-kmp", "vllm", "vllm-gpu", "transformers", "tensorrt-llm")


def add_speculation_flags(parser: argparse.ArgumentParser) -> None:
    """Adds one flag for each field of `SpeculationParams`."""
    group = parser.add_argument_group(
        "speculation", "How drafts are made: they change the speed, never the output."
    )
    group.add_argument("--no-speculation", action="store_true", help="make no drafts")
    group.add_argument(
        "--preset", choices=PRESETS, help="draft as this known drafter; other flags override it"
    )
    group.add_argument(
        "--num-speculative-tokens", type=int, metavar="K", help="maximum drafts verified per step"
    )
    group.add_argument("--prompt-lookup-min", type=int, metavar="N", help="shortest n-gram matched")
    group.add_argument("--prompt-lookup-max", type=int, metavar="N", help="longest n-gram matched")
    group.add_argument(
        "--algorithm",
        choices=("index", "kmp"),
        help="find matches by a hash index or a Knuth-Morris-Pratt scan; the drafts are the same",
    )
    group.add_argument(
        "--overlap",
        choices=("disjoint", "allowed"),
        help="whether a match may overlap the n-gram at the end",
    )
    group.add_argument(
        "--tie",
        choices=("earliest", "latest", "longest"),
        help="which of several matches is continued",
    )
    group.add_argument(
        "--tokens-per-match",
        type=int,
        metavar="N",
        help="with --tie longest: drafts verified per token of the match; 0: no limit",
    )
    group.add_argument(
        "--chained",
        action=argparse.BooleanOptionalAction,
        help="let a draft go on past the end of the known text by matching again",
    )
    group.add_argument(
        "--hint-tokens", type=int, metavar="N", help="maximum tokens that the drafter is asked for"
    )
    group.add_argument(
        "--pool", default="", metavar="NAME", help="draft from this pool, and feed it"
    )
    group.add_argument(
        "--pool-min-ngram",
        type=int,
        metavar="N",
        help="ask the pool when the request's own match is shorter",
    )
    group.add_argument(
        "--pool-keep",
        choices=("nothing", "output", "all"),
        help="part of this request's text that its pool gets (default: its output)",
    )
    group.add_argument(
        "--pool-feed-tokens",
        type=int,
        default=0,
        metavar="N",
        help="feed the pool every N tokens while the request runs; 0, the default: at its end",
    )
    group.add_argument(
        "--pool-keep-cancelled",
        action="store_true",
        help="feed the pool also if the request is cancelled or fails",
    )


def speculation_params(arguments: argparse.Namespace) -> SpeculationParams:
    """The parameters that the flags set."""
    names = {field.name for field in dataclasses.fields(SpeculationParams)} - {"enabled"}
    return SpeculationParams(
        enabled=False if arguments.no_speculation else None,
        **{name: getattr(arguments, name) for name in names},
    )

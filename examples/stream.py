"""A stream of tokens from a gateway, with the blocking client.

    tandem up                             # in another terminal
    python examples/stream.py
    python examples/stream.py --first-line

Prints the text as it comes, then what the drafts saved. With --first-line, the program leaves the
stream at the first line break; that cancels the request, and its resources are free at once.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator

from tandem.client import Chunk, Event, Finished, GenerationRequest, TandemClient, TandemError

# The bundled model renames an identifier.
CODE = """\
def read(path):
    with open(path) as file:
        return file.read()
"""
PROMPT = f"<|code|>{CODE}<|rename|>path<|to|>name<|out|>"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompt", nargs="?", default=PROMPT)
    parser.add_argument("--target", default="127.0.0.1:50050", metavar="HOST:PORT")
    parser.add_argument("--first-line", action="store_true", help="stop at the first line break")
    arguments = parser.parse_args()
    request = GenerationRequest(prompt=arguments.prompt, max_new_tokens=128)
    try:
        with (
            TandemClient(arguments.target) as client,
            contextlib.closing(client.stream(request)) as events,
        ):
            show(events, only_first_line=arguments.first_line)
    except TandemError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return 0


def show(events: Iterator[Event], *, only_first_line: bool) -> None:
    for event in events:
        match event:
            case Chunk():
                line, line_break, _ = event.text.partition("\n")
                if only_first_line and line_break:
                    print(line)
                    return
                print(event.text, end="", flush=True)
            case Finished():
                usage = event.usage
                print(f"\n{usage.output_tokens} tokens in {usage.num_steps} steps of the model;")
                print(f"{usage.num_accepted_tokens} of {usage.num_draft_tokens} drafts accepted")


if __name__ == "__main__":
    sys.exit(main())

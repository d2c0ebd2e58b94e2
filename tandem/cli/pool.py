"""`tandem pool load`: files that requests draft from, in a pool of the caller's tenant.

Owns the flags, and which files are texts.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from tandem.cli.connection_flags import ConnectionFlags
from tandem.cli.flag_groups import with_flag_groups
from tandem.cli.terminal import report, waiting_for
from tandem.client import TandemClient, TandemError

EXAMPLES = (
    "tandem pool load handbook docs/*.md",
    "tandem pool load library src/*.py --target gateway:50050 --tls-ca ca.pem",
)

# Of LoadPoolRequest.
_MAX_TEXT_BYTES = 4_128_768


@with_flag_groups
def command(
    action: Annotated[Literal["load"], typer.Argument(help="load: put files into the pool")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="of the pool")],
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="texts in UTF-8")],
    *,
    model_id: Annotated[str, typer.Option(help="model, if the gateway serves several")] = "",
    connection: ConnectionFlags,
) -> int:
    """Puts files into a pool, from which requests that name it draft.

    Output is the same with and without. A file that is there already changes nothing; the oldest
    texts of a full pool are forgotten. Nothing is loaded if a file cannot be read, is no text or is
    larger than 4 MB.
    """
    connection.check()
    texts = [(file, _read(file)) for file in files]
    num_tokens = num_texts = 0
    try:
        client = TandemClient(
            connection.target,
            tls=connection.tls_options(),
            token=connection.token(),
            allow_plaintext_token=connection.allow_plaintext_token,
        )
        with client:
            for file, text in texts:
                # A package's empty files hold nothing to draft.
                if not text:
                    continue
                with waiting_for(str(file)):
                    num_tokens += client.load_pool(name, text, model_id=model_id)
                num_texts += 1
    except TandemError as error:
        report("pool", f"{file}: {connection.describe(error)}")
        return 1
    except (OSError, ValueError) as error:
        report("pool", str(error))
        return 1
    finally:
        print(f"{num_texts} texts, {num_tokens} tokens loaded into the pool {name}")
    return 0


def _read(file: Path) -> str:
    """The file's text.

    Raises:
        typer.BadParameter: it has none; names the file.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(_MAX_TEXT_BYTES + 1)
        if len(content) > _MAX_TEXT_BYTES:
            raise ValueError(f"is larger than {_MAX_TEXT_BYTES} bytes")
        text = content.decode("utf-8-sig")
        if "\0" in text:
            raise ValueError("is no text: it holds a NUL")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise typer.BadParameter(f"{file}: {reason}", param_hint="FILES") from None
    return text

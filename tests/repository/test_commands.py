"""Quick start (docs/acceptance.md): every shown command and program is run, or at least read.

Programs, and commands of clients, run as written against one gateway; only the addresses are
others. `READ_ONLY` lists the commands that cannot run here, why, and what is checked instead.
"""

import contextlib
import functools
import io
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from benchmarks.workloads import REAL_MODEL
from drafter.config import DrafterConfig
from examples.transformers_prompt_lookup import local_drafter
from gateway.config import GatewayConfig
from servicekit.config import list_options
from tandem.cli.up import BUNDLED_MODEL
from tandem.local import local_tandem
from tests.repository.shown_commands import (
    PAGES,
    REPOSITORY,
    Shown,
    commands,
    inline_commands,
    programs,
)
from tests.repository.unrun_commands import READ_ONLY, begins, errors_of
from verifier.config import VerifierConfig

# On a machine where no kernel is compiled yet, services start for minutes.
pytestmark = pytest.mark.timeout(600)

# Commands that end by themselves within seconds and change nothing but a gateway's counters.
RUN = (
    ["tandem", "generate"],
    ["curl"],
    ["python", "-c"],
    ["python", "examples/stream.py"],
    ["python", "examples/stream_async.py"],
    ["make", "demo"],
)

# Of these, the ones that call `TARGET` unless they are given another one.
WITH_TARGET = (["tandem", "generate"], ["python", "examples/stream"])
TARGET = "127.0.0.1:50050"


@pytest.fixture(scope="module")
def addresses() -> Iterator[Mapping[str, str]]:
    """The shown addresses, and those of a running system.

    Its flags are those of all `tandem up` in the documentation, but for a model of the reader's.
    """
    ups = [shown.words[2:] for shown in commands() if is_up(shown) and "--model" not in shown.words]
    options = list(itertools.chain.from_iterable(ups))
    with local_tandem(model=BUNDLED_MODEL, options=options, quiet=True) as started:
        yield {TARGET: started["grpc"], "127.0.0.1:8000": started["http"]}


@pytest.fixture(scope="module")
def real_addresses() -> Iterator[Mapping[str, str]]:
    if not REAL_MODEL.exists():
        pytest.skip("make real-model")
    with local_tandem(model=REAL_MODEL.parent, quiet=True) as started:
        yield {"127.0.0.1:8000": started["http"]}


@pytest.fixture(scope="module")
def drafter_addresses() -> Iterator[Mapping[str, str]]:
    with local_drafter() as address:
        yield {"127.0.0.1:50051": address}


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """With `python` and `tandem` of this environment first on the path.

    For make, their folder is an environment where everything is installed.
    """
    environment = tmp_path_factory.mktemp("venv")
    folder = environment / "bin"
    folder.mkdir()
    (environment / ".installed-all").touch()
    for name, module in (("python", ""), ("tandem", "-m tandem")):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        program.chmod(0o755)
    others = {
        name: value
        for name, value in os.environ.items()
        if "PYTEST" not in name and "MAKE" not in name
    }
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    return others | {"PATH": path, "PYTHONPATH": str(REPOSITORY), "VENV": str(environment)}


def with_addresses(text: str, addresses: Mapping[str, str]) -> str:
    """The text with the addresses of what runs in place of those shown."""
    for shown, started in addresses.items():
        text = text.replace(shown, started)
    return text


def is_up(shown: Shown) -> bool:
    return begins(shown.words, ["tandem", "up"])


def is_run(shown: Shown) -> bool:
    """Whether it runs here: also only if it calls this machine."""
    elsewhere = "--target" in shown.words and TARGET not in shown.words
    return any(begins(shown.words, each) for each in RUN) and not elsewhere


@pytest.mark.parametrize("shown", [shown for shown in commands() if is_run(shown)], ids=str)
def test_the_command_runs_and_prints_the_shown_output(
    shown: Shown,
    addresses: Mapping[str, str],
    environ: Mapping[str, str],
    request: pytest.FixtureRequest,
) -> None:
    if shown.words[0] == "curl" and not shutil.which("curl"):
        pytest.skip("curl is not installed")
    if REAL_MODEL.stem in shown.text:
        addresses = request.getfixturevalue("real_addresses")
    text = shown.text
    if any(begins(shown.words, each) for each in WITH_TARGET) and "--target" not in shown.words:
        text = f"{text.partition('  #')[0]} --target {TARGET}"
    # An answer with an error status must fail, too.
    text = re.sub("^curl ", "curl --fail-with-body ", text)
    ran = subprocess.run(
        ["bash", "-euc", with_addresses(text, addresses)],
        cwd=REPOSITORY,
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert shown.output is None or ran.stdout == shown.output
    assert ran.stdout.strip(), "a reader sees nothing"


@pytest.mark.parametrize("shown", programs(), ids=str)
def test_the_program_runs_and_prints_the_shown_output(
    shown: Shown, addresses: Mapping[str, str], request: pytest.FixtureRequest
) -> None:
    if "127.0.0.1:50051" in shown.text:
        addresses = request.getfixturevalue("drafter_addresses")
    assert with_addresses(shown.text, addresses) != shown.text, "whom does it call?"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(with_addresses(shown.text, addresses), {"__name__": "__main__"})
    assert shown.output is None or printed.getvalue() == shown.output
    assert printed.getvalue().strip(), "a reader sees nothing"


# Commands that are only read


@pytest.mark.parametrize("shown", [shown for shown in commands() if not is_run(shown)], ids=str)
def test_a_command_that_cannot_run_here_names_what_exists(shown: Shown) -> None:
    checks = [check for start, _, check in READ_ONLY if begins(shown.words, start)]
    assert checks, f"`{shown.text}` is neither in RUN nor in READ_ONLY"
    checks[0](shown.words)


@functools.cache
def shown_module_commands() -> Mapping[tuple[str, ...], Shown]:
    """The modules with a parser that are run with arguments, in blocks and within sentences."""
    found: dict[tuple[str, ...], Shown] = {}
    for shown in [*commands(), *inline_commands("python"), *inline_commands("torchrun")]:
        # Marks of what may be left out, and a placeholder for a number.
        text = re.sub(r" > .*|[][]|\.\.\.", "", shown.text)
        words = [{"N": "2"}.get(word, word) for word in shlex.split(text, comments=True)]
        if words[:2] == ["python", "-m"] and len(words) > 3 and has_parser(words[2]):
            found[tuple(words[2:])] = shown
        if words[0] == "torchrun":
            served = words.index("-m") + 1
            found["torch.distributed.run", *words[1 : served + 1]] = shown
            found[tuple(words[served:])] = shown
    return found


def has_parser(module: str) -> bool:
    if module.startswith("deploy."):  # its packages come with the extra `docs` only
        return False
    path = REPOSITORY / module.replace(".", "/")
    main = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    # Others are Python's own.
    return main.is_file() and re.search(r"argparse|load_config", main.read_text()) is not None


def test_modules_accept_their_arguments() -> None:
    shown = shown_module_commands()
    assert len(shown) > 10
    wrong_one = ("benchmarks.drafter", "--no-such-flag")
    *errors, error = errors_of([*shown, wrong_one])
    assert error is not None, "the parsers are not asked"
    wrong = dict(zip(shown.items(), errors, strict=True))
    assert {f"{at}: {words}": error for (words, at), error in wrong.items() if error} == {}


def test_variables_of_services_exist() -> None:
    """A name in the text may be the beginning of several."""
    services = (
        ("drafter", DrafterConfig),
        ("gateway", GatewayConfig),
        ("verifier", VerifierConfig),
    )
    known = [
        option.variable
        for service, config in services
        for option in list_options(config, service=service)
    ]
    named = {
        name
        for page in PAGES
        for name in re.findall(
            r"\bTANDEM_(?:DRAFTER|GATEWAY|VERIFIER)_[A-Z_]*[A-Z](?!\.\.\.)", page.read_text()
        )
    }
    assert len(named) > 10
    assert named - set(known) == set()


# Flags of Prometheus, kubectl, deploy/images/build.sh, torchrun and pytest-xdist.
OTHERS_FLAGS = {
    "--dist",
    "--enable-feature",
    "--from-literal",
    "--local-base",
    "--max-restarts",
    "--previous",
    "--standalone",
}


def test_flags_within_sentences_exist() -> None:
    """Each is a literal of the code, or a field of a configuration."""
    folders = ("benchmarks", "deploy", "drafter", "examples", "gateway", "servicekit", "tandem")
    files = [
        path
        for folder in (*folders, "tests", "verifier")
        for path in (REPOSITORY / folder).rglob("*.py")
    ]
    code = "".join(path.read_text() for path in files)
    known = set(re.findall(r"[\"'](--[a-z][a-z0-9-]+)", code)) | OTHERS_FLAGS
    fields = re.findall(r"^    ([a-z]\w+): ", code, re.MULTILINE)
    known |= {"--" + field.replace("_", "-") for field in fields}
    missing = {
        f"{page.name}: {flag}"
        for page in PAGES
        for code in re.findall(r"`([^`\n]+)`", page.read_text())
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w*-])", code)
        if flag not in known and flag.replace("--no-", "--") not in known
    }
    assert missing == set()

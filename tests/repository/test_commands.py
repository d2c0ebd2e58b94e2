"""Quick start (docs/acceptance.md): every shown command and program is run, or at least read.

Programs, and commands of clients, run as written against one gateway; only the addresses are
others. `READ_ONLY` lists the commands that cannot run here, why, and what is checked instead.
"""

import contextlib
import functools
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from benchmarks.workloads import REAL_MODEL
from drafter.config import DrafterConfig
from examples.transformers_prompt_lookup import local_drafter
from gateway.config import GatewayConfig
from servicekit.channels.tls import read_server_certificate
from servicekit.config import ServerOptions, list_options
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


def begins(words: Sequence[str], beginning: Sequence[str]) -> bool:
    """Whether the words begin so, the last one perhaps in part."""
    *whole, part = beginning
    start = words[: len(beginning)]
    return start[:-1] == whole and start[-1:] != [] and start[-1].startswith(part)


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


def check_make(words: Sequence[str]) -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in words[1:]:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def check_pip(words: Sequence[str]) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    pinned = (REPOSITORY / "constraints.txt").read_text()
    assert words[1] == "install"
    for word in words[2:]:
        if extra := re.fullmatch(r"\.\[(\w+)\]", word):
            assert extra[1] in project["optional-dependencies"]
        elif not word.startswith("-") and word != ".":
            assert (REPOSITORY / word).is_file() or f"\n{word}==" in pinned, word


def check_paths(words: Sequence[str]) -> None:
    for word in words:
        assert "/" not in word or word.startswith(".venv/") or (REPOSITORY / word).exists(), word


def check_docker(words: Sequence[str]) -> None:
    if words[1] == "push":
        assert words[2] in {name for shown in commands() for name in built_image(shown.words)}
        return
    file = REPOSITORY / words[words.index("-f") + 1]
    if words[1] == "compose":
        assert yaml.safe_load(file.read_text())["services"]
        return
    assert words[1] == "build"
    dockerfile = file.read_text()
    for word, value in itertools.pairwise(words):
        if word == "--build-arg":
            argument = value.partition("=")[0]
            assert re.search(rf"^ARG {argument}\b", dockerfile, re.MULTILINE), argument


def built_image(words: Sequence[str]) -> Sequence[str]:
    """The image's name, if this is `docker build`."""
    return [words[words.index("-t") + 1]] if words[:2] == ["docker", "build"] else []


@functools.cache
def help_of(*command: str) -> str:
    """What it prints with `--help`."""
    ran = subprocess.run(
        [*command, "--help"],
        cwd=REPOSITORY,
        # Where no flag is cut.
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def check_kubectl(words: Sequence[str]) -> None:
    """The command and its flags are known to kubectl; what it applies is there."""
    words = [word for word in words if word != "&"]
    inner = words[words.index("--") + 1 :] if "--" in words else []
    outer = words[: words.index("--")] if inner else words
    kubectl = shutil.which("kubectl") or str(Path(sys.executable).with_name("kubectl"))
    help_of(kubectl, *outer[1:])
    if inner[:2] == ["python", "-m"]:
        assert errors_of([inner[2:]]) == [None]
    elif inner:
        # In every image: of Debian's coreutils.
        assert inner[0] == "sha256sum"


def check_helm(words: Sequence[str]) -> None:
    """It is Helm's, of this repository's chart; its other words are names."""
    assert words[1] in ("install", "upgrade", "rollback", "template")
    flags = {word for word in words if word.startswith("-")}
    assert flags <= {"-n", "-f"}
    for word in words:
        # "values.yaml" is the reader's own.
        assert "/" not in word or (REPOSITORY / word).exists(), word


def check_tandem(words: Sequence[str]) -> None:
    """The command has these flags."""
    shown = help_of(sys.executable, "-m", "tandem", words[1])
    for word in words[2:]:
        assert not word.startswith("-") or word.partition("=")[0] in shown, word


def check_openssl(words: Sequence[str]) -> None:
    """In a folder of its own, it makes files that a server can use."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(words, cwd=folder, capture_output=True, timeout=60, check=True)
        cert, key = (Path(folder) / words[words.index(flag) + 1] for flag in ("-out", "-keyout"))
        options = ServerOptions(
            listen="127.0.0.1:0", metrics_listen=None, tls_cert=cert, tls_key=key
        )
        assert read_server_certificate(options).expires_s > time.time()


def check_nothing(_words: Sequence[str]) -> None:
    """Another test reads or runs it."""


READ_ONLY: Sequence[tuple[Sequence[str], str, Callable[[Sequence[str]], None]]] = (
    (["tandem", "up"], "does not end; `addresses` has the flags of most", check_tandem),
    (["tandem", "generate"], "calls a gateway in a cluster", check_tandem),
    ([".", ".venv/bin/activate"], "changes the reader's shell", check_paths),
    (["export"], "changes the reader's shell", check_nothing),
    (["vllm", "serve"], "needs another server of models", check_nothing),
    (["hf", "download"], "downloads a model", check_nothing),
    (["openssl", "req"], "writes files", check_openssl),
    (["make"], "runs tests, this one among them", check_make),
    (["pip"], "changes the environment", check_pip),
    (["pytest"], "runs this test", check_paths),
    ([".venv/bin/python", "-m", "pytest"], "runs this test", check_paths),
    (["python", "examples/quickstart.py"], "test_readme.py runs it", check_nothing),
    (["python", "-m"], "measures for minutes, or serves; see the test of arguments", check_nothing),
    (["docker"], "needs a container engine", check_docker),
    (["helm"], "needs a cluster", check_helm),
    (["kind"], "needs a cluster", check_nothing),
    (["kubectl"], "needs a cluster", check_kubectl),
    (["tandem"], "does not end by itself, or takes long", check_tandem),
)


@pytest.mark.parametrize("shown", [shown for shown in commands() if not is_run(shown)], ids=str)
def test_a_command_that_cannot_run_here_names_what_exists(shown: Shown) -> None:
    checks = [check for start, _, check in READ_ONLY if begins(shown.words, start)]
    assert checks, f"`{shown.text}` is neither in RUN nor in READ_ONLY"
    checks[0](shown.words)


def errors_of(module_commands: Sequence[Sequence[str]]) -> list[str | None]:
    """What each module's own parser says of its arguments; None if they are right."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.repository.parse_only"],
        input=json.dumps(module_commands),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    errors: list[str | None] = json.loads(ran.stdout)
    return errors


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

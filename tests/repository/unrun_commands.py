"""What is checked of shown commands that cannot run here, and why they cannot."""

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from servicekit.channels.tls import read_server_certificate
from servicekit.config import ServerOptions
from tests.repository.shown_commands import (
    REPOSITORY,
    commands,
)


def begins(words: Sequence[str], beginning: Sequence[str]) -> bool:
    """Whether the words begin so, the last one perhaps in part."""
    *whole, part = beginning
    start = words[: len(beginning)]
    return start[:-1] == whole and start[-1:] != [] and start[-1].startswith(part)


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

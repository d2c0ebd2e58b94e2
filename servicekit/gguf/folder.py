"""The folder of a model that stands for a GGUF file: its documents, and links to the file.

Everything that reads models reads such folders, so nothing else knows where they come from. They
are in a folder of temporary files of this user, by the files' names, sizes and times, and are made
anew where they are not complete.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from servicekit.gguf.config import ROPE_FACTORS, config_of
from servicekit.gguf.header import GgufError, GgufHeader, read_header
from servicekit.gguf.tokenizer import tokenizer_config_of, tokenizer_of

_SUFFIX = ".gguf"
_DOCUMENTS = ("config.json", "tokenizer.json", "tokenizer_config.json")
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")


def model_folder(path: Path) -> Path:
    """The folder to read a model from: of a GGUF file, or a folder with one and no other weights,
    the one that stands for it; else the path itself.

    Raises:
        GgufError: the file is broken, not whole, or not served; or no folder can be written.
    """
    files = gguf_files(path)
    if not files:
        return path
    try:
        return _make(files)
    except OSError as error:
        raise GgufError(f"{files[0]}: no file, or no folder for it: {error}") from error


def gguf_files(path: Path) -> list[Path]:
    """The files of the GGUF model that a path names; none if it names something else.

    Raises:
        GgufError: a folder holds several models.
    """
    if path.is_dir():
        if (path / "config.json").exists() or any(path.glob("*.safetensors")):
            return []
        found = sorted(path.glob(f"*{_SUFFIX}"))
        if len(found) > 1 and not all(_PART.search(file.stem) for file in found):
            names = ", ".join(file.name for file in found)
            raise GgufError(f"{path}: holds several models, {names}: name one")
        return _parts(found[0]) if found else []
    return _parts(path) if path.suffix == _SUFFIX else []


def _parts(path: Path) -> list[Path]:
    """All files of a model that is split."""
    match = _PART.search(path.stem)
    if match is None:
        return [path]
    stem = path.stem[: match.start()]
    count = int(match[2])
    return [path.with_name(f"{stem}-{i:05d}-of-{count:05d}{_SUFFIX}") for i in range(1, count + 1)]


def _make(files: list[Path]) -> Path:
    # Another file under the same name is another model, and other code may read it otherwise.
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    for file in files:
        state = file.stat()
        digest.update(f"{file.resolve()} {state.st_size} {state.st_mtime_ns}\n".encode())
    stem = _PART.sub("", files[0].stem)
    base = Path(tempfile.gettempdir()) / f"tandem-gguf-{os.getuid()}"
    folder = base / digest.hexdigest()[:32] / stem
    base.mkdir(mode=0o700, exist_ok=True)
    if base.is_symlink() or base.stat().st_uid != os.getuid():
        raise GgufError(f"{base}: is another user's")
    if all((folder / name).exists() for name in (*_DOCUMENTS, *(file.name for file in files))):
        return folder
    texts = {name: json.dumps(content).encode() for name, content in _documents(files).items()}
    # What cleans up temporary files may have taken a part.
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    for name, text in texts.items():
        (made / name).write_bytes(text)
    for file in files:
        (made / file.name).symlink_to(file.resolve())
    try:
        made.rename(folder)
    except OSError:
        # Another process was first.
        shutil.rmtree(made)
        if not folder.is_dir():
            raise
    return folder


def _documents(files: list[Path]) -> dict[str, Any]:
    headers = [read_header(file) for file in files]
    tensors: dict[str, Any] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise GgufError(f"{header.path}: {name}: is in another file of the model, too")
            tensors[name] = tensor
    whole = GgufHeader(path=files[0], metadata=headers[0].metadata, tensors=tensors)
    contents = (
        config_of(whole, _rope_factors(headers)),
        tokenizer_of(whole),
        tokenizer_config_of(whole),
    )
    return dict(zip(_DOCUMENTS, contents, strict=True))


def _rope_factors(headers: list[GgufHeader]) -> "dict[str, np.ndarray[Any, Any]]":
    found = {}
    for header in headers:
        for name in ROPE_FACTORS:
            tensor = header.tensors.get(name)
            if tensor is None:
                continue
            if tensor.dtype != "F32":
                raise GgufError(f"{header.path}: {name}: is stored as {tensor.dtype}")
            with header.path.open("rb") as file:
                file.seek(tensor.start)
                content = file.read(tensor.end - tensor.start)
            found[name] = np.frombuffer(content, dtype="<f4")
    return found

"""Files of clients, for tests."""

import hashlib
import json
from pathlib import Path
from typing import Any


def digest_of(token: str) -> str:
    """The digest by which the file knows a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def write_clients(path: Path, **tenants: dict[str, Any]) -> Path:
    """Writes a file of tenants; `tokens` are theirs, other keys as in the file.

    JSON is YAML.
    """
    content = {}
    for name, tenant in tenants.items():
        clients = [{"token_sha256": digest_of(token)} for token in tenant.pop("tokens", ())]
        content[name] = {**tenant, "clients": [*clients, *tenant.get("clients", ())]}
    replace(path, json.dumps({"tenants": content}))
    return path


def replace(path: Path, text: str) -> None:
    """Whoever reads the file meanwhile gets the old text or the new."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text)
    beside.replace(path)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call with a token."""
    return (("authorization", f"Bearer {token}"),)

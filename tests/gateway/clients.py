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
    path.write_text(json.dumps({"tenants": content}))
    return path


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call with a token."""
    return (("authorization", f"Bearer {token}"),)

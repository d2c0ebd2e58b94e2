"""The copyright files of Debian's base system: texts with many common parts.

The base system is every installed package of priority `required` and its dependencies, so it is
nearly the same on all machines of one release. There is one file per package: packages built from
one source have the same text, and others quote the same licences.

Source: https://www.debian.org/doc/debian-policy/ch-controlfields.html, ch-relationships.html.
"""

import re
from pathlib import Path

_STATUS = Path("var/lib/dpkg/status")
_DOCUMENTS = Path("usr/share/doc")


def base_system_copyrights(root: Path = Path("/")) -> list[str]:
    """Returns the files in the order of package names; none without dpkg."""
    paths = [root / _DOCUMENTS / name / "copyright" for name in base_system(root)]
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file()]


def base_system(root: Path) -> list[str]:
    """Returns the packages' names, sorted."""
    status = root / _STATUS
    if not status.is_file():
        return []
    packages: dict[str, dict[str, str]] = {}
    for paragraph in status.read_text(encoding="utf-8").split("\n\n"):
        fields = dict(re.findall(r"^([\w-]+): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            packages[fields["Package"]] = fields

    required = [name for name, fields in packages.items() if fields.get("Priority") == "required"]

    # A package may provide others, as mawk provides awk; required packages come first.
    by_name = {name: name for name in packages}
    for name in [*required, *packages]:
        for [provided] in _relations(packages[name].get("Provides", "")):
            by_name.setdefault(provided, name)

    waiting = list(required)
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for kind in ("Pre-Depends", "Depends"):
            for alternatives in _relations(packages[name].get(kind, "")):
                here = [by_name[other] for other in alternatives if other in by_name]
                waiting += here[:1]
    return sorted(found)


def _relations(field: str) -> list[list[str]]:
    """`a (>= 1), b:any | c` is [[a], [b, c]]."""
    bare = re.sub(r"\([^)]*\)|:\w+", "", field)
    return [
        [name.strip() for name in clause.split("|")] for clause in bare.split(",") if clause.strip()
    ]

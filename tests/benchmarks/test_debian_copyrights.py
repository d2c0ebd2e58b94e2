"""Debian's base system, from a dpkg database in Debian's format."""

from pathlib import Path

from benchmarks.debian_copyrights import base_system, base_system_copyrights

STATUS = """\
Package: gawk
Status: install ok installed
Priority: optional
Provides: awk

Package: base-files
Essential: yes
Status: install ok installed
Priority: required
Architecture: amd64
Pre-Depends: awk
Description: miscellaneous files
 Depends: editor

Package: editor
Status: install ok installed
Priority: important
Depends: libc6

Package: libc6
Status: install ok installed
Priority: optional
Depends: libgcc-s1, libcrypt1 (>= 1:4.4.10-10~)
Suggests: editor

Package: libcrypt1
Status: install ok installed
Priority: optional
Depends: libc6 (>= 2.36)

Package: libgcc-s1
Status: install ok installed
Priority: optional

Package: mawk
Status: install ok installed
Priority: required
Provides: awk (= 1.3)
Pre-Depends: libc6 (>= 2.34)
Depends: missing | perl:any (>= 5.6) | editor

Package: old
Status: deinstall ok config-files
Priority: required

Package: perl
Status: install ok installed
Priority: standard
"""


def make_root(folder: Path, copyrights: dict[str, bytes]) -> Path:
    status = folder / "var/lib/dpkg/status"
    status.parent.mkdir(parents=True)
    status.write_text(STATUS)
    for name, content in copyrights.items():
        path = folder / "usr/share/doc" / name / "copyright"
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    return folder


def test_the_base_system_is_the_required_packages_and_their_dependencies(tmp_path: Path) -> None:
    found = base_system(make_root(tmp_path, {}))
    assert found == ["base-files", "libc6", "libcrypt1", "libgcc-s1", "mawk", "perl"]


def test_every_package_gives_its_text_in_order_with_copies(tmp_path: Path) -> None:
    root = make_root(
        tmp_path,
        {
            "perl": b"of perl",
            "libcrypt1": b"the same",
            "editor": b"not of the base system",
            "mawk": b"in latin-1: \xe9",
        },
    )
    (root / "usr/share/doc/libc6").symlink_to("libcrypt1")
    found = base_system_copyrights(root)
    assert found == ["the same", "the same", "in latin-1: \N{REPLACEMENT CHARACTER}", "of perl"]


def test_there_are_none_without_dpkg(tmp_path: Path) -> None:
    assert base_system_copyrights(tmp_path) == []

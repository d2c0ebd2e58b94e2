"""Reads a JSON schema as a client wrote it."""

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from verifier.structured.json_schema import endings
from verifier.structured.json_schema.exclusion import Exclusion
from verifier.structured.json_schema.keywords import (
    ANNOTATIONS_OF_NAMES,
    ENFORCED_FORMATS,
    IN_PLACE,
    LISTS,
    MAPS,
    REFUSED,
    SCHEMA,
    STRUCTURE,
    VALUES,
    constrains_nothing,
)
from verifier.structured.json_schema.objects import read_object
from verifier.structured.json_schema.patterns import (
    LOOK_AROUND,
    needs_control_characters,
    without_look_ahead,
)
from verifier.structured.json_schema.probes import OPTIONS, error_of, is_contradictory
from verifier.structured.json_schema.refusals import (
    NO_CONTROL_CHARACTERS,
    SchemaError,
    member,
    refused,
)
from verifier.structured.json_schema.values import checked_value, read_range

_MAX_LOCATED = 200


class ReadSchema(NamedTuple):
    """A schema for the library.

    Attributes:
        schema: without the library's options.
        ignored_formats: which the library does not know, each once, in order.
        paths: in the schema as it was given, of those in its $defs, by their names there.
    """

    schema: dict[str, Any]
    ignored_formats: tuple[str, ...]
    paths: Mapping[str, str]


def read_schema(given: Any) -> ReadSchema:
    """Reads a JSON schema.

    Raises:
        SchemaError: it asks for what cannot be kept.
    """
    reader = _Reader(given)
    try:
        schema = reader.read_root()
    except RecursionError:
        raise SchemaError("the schema is nested too deeply") from None
    return ReadSchema(schema, tuple(reader.ignored_formats), reader.paths)


def with_options(read: ReadSchema) -> dict[str, Any]:
    """The schema as it is to stand in a grammar."""
    return {"x-guidance": dict(OPTIONS), **read.schema}


def located(read: ReadSchema, reason: str) -> str:
    """What the library says of the schema, with the place that it says it of."""
    definitions = read.schema.get("$defs", {})
    path, schema = "$", read.schema
    num_tried = 0
    while True:
        for inner_path, inner in _schemas_in(schema, path, read):
            num_tried += 1
            if num_tried > _MAX_LOCATED:
                return f"{path}: {reason}"
            error = error_of({**inner, "$defs": definitions})
            if error is not None:
                path, schema, reason = inner_path, inner, error
                break
        else:
            return f"{path}: {reason}"


def _schemas_in(schema: Any, path: str, read: ReadSchema) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those that a schema consists of, with their paths."""
    found: list[tuple[str, Any]] = []
    for key, value in schema.items():
        place = f"{path}.{key}"
        if key in MAPS:
            found += [(member(place, name), each) for name, each in value.items()]
        elif key in LISTS:
            found += [(f"{place}[{i}]", each) for i, each in enumerate(value)]
        elif key in SCHEMA:
            found.append((place, value))
        elif key == "$ref":
            name = endings.name_of(value)
            found.append((read.paths[name], read.schema["$defs"][name]))
    yield from ((place, each) for place, each in found if isinstance(each, dict))


class _Reader:
    def __init__(self, given: Any) -> None:
        self._root = given
        self.paths: dict[str, str] = {}
        self.ignored_formats: dict[str, None] = {}
        # The targets of references, as they are written; of those that are multiplied, apart.
        self._names: dict[tuple[str, bool], str] = {}
        self._definitions: dict[str, Any] = {}
        self._waiting: list[tuple[str, str, bool]] = []
        self._exclusion = Exclusion(self._target)

    def read_root(self) -> dict[str, Any]:
        root = self._read(self._root, "$", False)
        while self._waiting:
            reference, name, is_joined = self._waiting.pop()
            target, self.paths[name] = self._target(reference, "$")
            self._definitions[name] = self._read(target, self.paths[name], is_joined)
        root, definitions = endings.without_endless(root, self._definitions)
        if isinstance(root, bool):
            root = {} if root else {"not": {}}
        return {**root, "$defs": definitions} if definitions else root

    def _read(self, given: Any, path: str, is_joined: bool) -> Any:
        if isinstance(given, bool):
            return given
        if not isinstance(given, dict):
            raise refused(path, "a schema must be an object, true or false")
        self._refuse(given, path)
        if given.get("not") is True or given.get("not") == {}:
            return False
        is_joined = is_joined or self._num_parts(given, path) > 1
        read: dict[str, Any] = {}
        for key, value in _of_draft_2020(given, path).items():
            place = f"{path}.{key}"
            if key in VALUES:
                read[key] = checked_value(key, value, place)
            elif key == "$ref":
                read[key] = self._reference(value, place, is_joined)
            elif key in MAPS:
                if not isinstance(value, dict):
                    raise refused(place, "must be an object")
                read[key] = {
                    name: self._read(each, member(place, name), is_joined)
                    for name, each in value.items()
                }
            elif key in LISTS:
                read[key] = self._list(value, place, is_joined)
            elif key in SCHEMA and key != "propertyNames":
                read[key] = self._read(value, place, is_joined)
        self._read_format(given, read)
        self._read_pattern(read, path)
        read_range(read, path)
        self._read_one_of(given, read, path)
        self._read_names(given, read, path)
        read_object(read, path, is_joined)
        # What stands beside these is taken together by the library only where nothing is between.
        last = {key: read.pop(key) for key in IN_PLACE if key in read}
        read |= last
        return read

    def _list(self, value: Any, path: str, is_joined: bool) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise refused(path, "must be a list that is not empty")
        return [self._read(each, f"{path}[{i}]", is_joined) for i, each in enumerate(value)]

    def _refuse(self, given: dict[str, Any], path: str) -> None:
        for key, instead in REFUSED.items():
            if key in given and not constrains_nothing(key, given):
                raise refused(f"{path}.{key}", f"is not supported; {instead}")

    # References.

    def _reference(self, value: Any, path: str, is_joined: bool) -> str:
        self._target(value, path)
        key = (value, is_joined)
        if key not in self._names:
            self._names[key] = str(len(self._names))
            self._waiting.append((value, self._names[key], is_joined))
        return f"#/$defs/{self._names[key]}"

    def _target(self, reference: Any, path: str) -> tuple[Any, str]:
        """The schema that a reference names, and its path."""
        if not isinstance(reference, str):
            raise refused(path, "must be a string")
        document, _, fragment = reference.partition("#")
        own = self._root.get("$id", "") if isinstance(self._root, dict) else ""
        if document not in ("", own) or not (fragment == "" or fragment.startswith("/")):
            raise refused(path, "must be # or begin with #/; write the schema into $defs")
        target, place = self._root, "$"
        for part in fragment.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and name in target:
                target = target[name]
                place = member(place, name)
            elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
                place = f"{place}[{name}]"
            else:
                raise refused(path, "names no schema; what it names must be in this schema")
        return target, place

    def _num_parts(self, given: Any, path: str, depth: int = 8) -> int:
        """How many schemas of the parts of a value stand beside each other."""
        if not isinstance(given, dict):
            return 0
        if depth == 0:
            return 2
        num = int(bool(STRUCTURE & given.keys()))
        for key in ("const", "enum"):
            num += "{" in json.dumps(given.get(key))
        if "$ref" in given:
            target, _ = self._target(given["$ref"], f"{path}.$ref")
            num += self._num_parts(target, path, depth - 1)
        if isinstance(given.get("allOf"), list):
            num += sum(self._num_parts(each, path, depth - 1) for each in given["allOf"])
        for key in ("anyOf", "oneOf"):
            if isinstance(given.get(key), list):
                each = (self._num_parts(option, path, depth - 1) for option in given[key])
                num += max(each, default=0)
        return num

    # Single keywords.

    def _read_format(self, given: dict[str, Any], read: dict[str, Any]) -> None:
        if "format" in read and read["format"] not in ENFORCED_FORMATS:
            del read["format"]
            kind = given.get("type", "string")
            if kind == "string" or "string" in kind:
                self.ignored_formats.setdefault(given["format"])

    def _read_pattern(self, read: dict[str, Any], path: str) -> None:
        if "pattern" not in read:
            return
        patterns = without_look_ahead(read["pattern"])
        if needs_control_characters(read["pattern"]):
            raise refused(f"{path}.pattern", NO_CONTROL_CHARACTERS)
        if any(map(LOOK_AROUND.search, patterns)):
            instead = r"write a pattern without (?=, (?!, (?<=, (?<! and \b"
            raise refused(f"{path}.pattern", f"look-around is not supported; {instead}")
        read["pattern"], *others = patterns
        if others:
            read["allOf"] = [*read.get("allOf", ()), *({"pattern": each} for each in others)]
        both: dict[str, Any] = {key: read[key] for key in ("pattern", "format") if key in read}
        if "format" in both and is_contradictory({"type": "string", **both}, {}):
            # As of what Zod writes for a time: it has no zone.
            self.ignored_formats.setdefault(read.pop("format"))

    def _read_one_of(self, given: dict[str, Any], read: dict[str, Any], path: str) -> None:
        """As anyOf, if no two of its schemas hold for one value."""
        if "oneOf" not in read:
            return
        options = given["oneOf"]
        for (i, one), (j, other) in itertools.combinations(enumerate(options), 2):
            if not self._exclusion.holds(one, other, path):
                instead = (
                    "write anyOf, or give each object a property that is required, with a const of "
                    "its own"
                )
                reason = f"a value may be valid under both {i} and {j}, which is not supported"
                raise refused(f"{path}.oneOf", f"{reason}; {instead}")
        options = read.pop("oneOf")
        if "anyOf" in read:
            read["allOf"] = [*read.get("allOf", ()), {"anyOf": options}]
        else:
            read["anyOf"] = options

    def _read_names(self, given: dict[str, Any], read: dict[str, Any], path: str) -> None:
        """propertyNames, as properties or patternProperties."""
        names: Any = given.get("propertyNames", True)
        place = f"{path}.propertyNames"
        for _ in range(8):
            if not isinstance(names, dict) or "$ref" not in names:
                break
            names = self._target(names["$ref"], place)[0]
        if names is True:
            return
        if not isinstance(names, dict):
            raise refused(place, "must be a schema that allows a name")
        says: dict[str, Any] = dict(names)
        for key in ANNOTATIONS_OF_NAMES:
            says.pop(key, None)
        if says.get("type") == "string":
            del says["type"]
        if not says:
            if "format" in names:
                self.ignored_formats.setdefault(str(names["format"]))
            return
        is_alone = "properties" not in read and "patternProperties" not in read
        allowed = says.get("enum", [says["const"]] if "const" in says else None)
        others = read.get("additionalProperties", True)
        if is_alone and len(says) == 1 and isinstance(allowed, list):
            read["properties"] = {name: others for name in allowed if isinstance(name, str)}
        elif is_alone and says.keys() == {"pattern"} and isinstance(says["pattern"], str):
            read["patternProperties"] = {says["pattern"]: others}
        else:
            instead = "write the names as properties, or a pattern of them as patternProperties"
            raise refused(place, f"is not supported; {instead}")
        read["additionalProperties"] = False


def _of_draft_2020(given: dict[str, Any], path: str) -> dict[str, Any]:
    """A schema in which a list of items, of older drafts, is prefixItems."""
    if not isinstance(given.get("items"), list):
        return given
    if "prefixItems" in given:
        raise refused(f"{path}.items", "must be a schema, beside prefixItems")
    written = {key: value for key, value in given.items() if key != "items"}
    if given["items"]:
        written["prefixItems"] = given["items"]
    if "additionalItems" in given:
        written["items"] = given["additionalItems"]
    return written

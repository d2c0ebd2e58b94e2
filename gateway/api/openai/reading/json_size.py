"""How much JSON text holds, before it is parsed.

Parsing holds the interpreter, in whatever thread: a text of 4 MiB may take it for seconds. Owns the
count, which takes milliseconds, and its limit.
"""

#: The most strings, objects and lists that are parsed at a time.
MAX_JSON_SIZE = 1 << 15


def json_size(text: bytes, *, numbers_per_string: int, enough: int = 0) -> int:
    """How many strings, objects and lists a text holds; several numbers count as one.

    Of what is no JSON, what comes before the mistake counts, and perhaps more.

    Args:
        text: UTF-8.
        numbers_per_string: how many numbers cost as much as a string.
        enough: a result that is not over this may be too high, and is found faster.
    """

    def size_of(outside: bytes, num_quotes: int) -> int:
        num_containers = outside.count(b"[") + outside.count(b"{")
        return num_quotes // 2 + num_containers + outside.count(b",") // numbers_per_string

    estimate = size_of(text, text.count(b'"'))
    if estimate <= enough:
        return estimate
    # Quotes in strings are escaped, and so are backslashes before them.
    unescaped = text.replace(rb"\\", b"").replace(rb"\"", b"")
    num_quotes = unescaped.count(b'"')
    if num_quotes // 2 > MAX_JSON_SIZE:
        return num_quotes // 2
    return size_of(b"".join(unescaped.split(b'"')[::2]), num_quotes)

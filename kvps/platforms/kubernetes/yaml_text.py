"""YAML of plain data: block mappings and lists, and JSON for every scalar.

PyYAML would be a dependency for one command, and its flags decide what the output looks like. A
JSON scalar is a YAML scalar, so what has to be written here is the indentation alone. The tests
read the result with PyYAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TypeAlias

Data: TypeAlias = "dict[str, Data] | list[Data] | str | int | bool"
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9./_-]*")
"""Texts that need no quotes, unless YAML 1.1 reads them as another type."""
_OTHER_TYPES = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
_FOREIGN = re.compile(r"[^ -~]")


def document(data: Data) -> str:
    """Return ``data`` as a YAML document; a mapping keeps its order."""
    return "\n".join(_lines(data)) + "\n"


def _lines(data: Data) -> Iterator[str]:
    if isinstance(data, dict) and data:
        for name, value in data.items():
            is_nested = isinstance(value, dict | list) and value
            first, *more = _lines(value)
            if is_nested:
                yield f"{_scalar(name)}:"
                yield from (f"  {line}" for line in (first, *more))
            else:
                yield f"{_scalar(name)}: {first}"
    elif isinstance(data, list) and data:
        for value in data:
            first, *more = _lines(value)
            yield f"- {first}"
            yield from (f"  {line}" for line in more)
    else:
        yield _scalar(data)


def _scalar(data: Data) -> str:
    is_plain = isinstance(data, str) and _PLAIN.fullmatch(data) and data.lower() not in _OTHER_TYPES
    if is_plain:
        return str(data)
    # Not as JSON escapes them: half of a surrogate pair is no character to YAML.
    return _FOREIGN.sub(lambda m: f"\\U{ord(m[0]):08x}", json.dumps(data, ensure_ascii=False))

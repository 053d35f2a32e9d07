"""Names in place of paths: what a run writes may be shared, so nothing in it says where a user keeps their files.

Only the command, in run.json alone, stays as it was typed.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import PurePath
from typing import Any

COMMAND = "command"  # the entry of run.json that stays as typed
_START = r"(?:~|[A-Za-z]:)?[/\\]"
_WHOLE = re.compile(rf"{_START}[^\n]*")
_QUOTED = re.compile(rf"(['\"`])({_START}(?:(?!\1).)+)\1")
_BARE = re.compile(r"(?<![\w./~\\-])(?:~|[A-Za-z]:)?(?:/[^\s/'\"`<>|:,;()\[\]{}=]+){2,}/?")


def name_of(path: str) -> str:
    """The last part of a path.

    >>> name_of("/home/ada/corpus/"), name_of("C:\\\\data\\\\a.txt")
    ('corpus', 'a.txt')
    """
    return PurePath(path.replace("\\", "/").rstrip("/")).name or "folder"


def placeless(value: Any) -> Any:
    """A text, or the texts of nested lists and mappings, with the last part of every absolute path in its place.

    >>> placeless("cut from '/home/ada/a b.txt' and /home/ada/c.txt; see https://a.org/b/c")
    "cut from 'a b.txt' and c.txt; see https://a.org/b/c"
    """
    if isinstance(value, dict):
        return {placeless(key): placeless(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [placeless(each) for each in value]
    if not isinstance(value, str) or ("/" not in value and "\\" not in value):
        return value
    if _WHOLE.fullmatch(value) and ": " not in value and "; " not in value and "/" in value[1:]:
        return name_of(value)
    quoted = _QUOTED.sub(lambda found: f"{found[1]}{name_of(found[2])}{found[1]}", value)
    return _BARE.sub(lambda found: name_of(found[0]), quoted)


def marked(value: Any) -> Any:
    """As `placeless`, with a digest of the whole text, so that --resume can tell two places of one name apart.

    >>> marked({"data": "/home/ada/corpus", "tokens": 64})
    {'data': 'corpus [7dca3d55]', 'tokens': 64}
    """
    if isinstance(value, dict):
        return {key: marked(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [marked(each) for each in value]
    short = placeless(value)
    return value if short == value else f"{short} [{hashlib.sha256(value.encode()).hexdigest()[:8]}]"


def without_places(about: dict[str, Any], *, share: bool = False) -> dict[str, Any]:
    """The record of a run without paths; the command stays as typed, unless it is to be shared."""
    kept = {name: value if name == COMMAND and not share else placeless(value) for name, value in about.items()}
    return kept | ({"config": marked(about["config"])} if "config" in about else {})


def placeless_columns(columns: dict[str, list[Any]]) -> None:
    """Take paths out of the columns of a table that may name one."""
    for name in ("model", "revision", "data", "note"):
        columns[name] = [placeless(text) if text and "/" in text else text for text in columns[name]]

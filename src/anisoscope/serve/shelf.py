"""The runs below some folders, as a server lists them: their names, and a version that changes when a file does.

Only times and sizes of files are read, so a look at a hundred runs costs milliseconds and also works on network file
systems, where nothing tells of a change.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from anisoscope.errors import AnisoscopeError, unknown_name

DEPTH = 4  # folders below a given one in which runs are looked for
MOST = 2000  # runs that are listed
_MARKS = ("run.json", "lock.json", "table.parquet")
_WATCHED = ("run.json", "table.parquet", "verdicts.json", "comparison.json", "concepts.json", "lock.json")
_LOG = "log.jsonl"  # drawn until something is measured; it grows with every update, and so would the work
_GROWING = ("parts", "partial")  # folders that get a file for each measured step or pass


class Shelf:
    """The runs of some folders by name; a name that is not in the list is refused, whatever it looks like."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [Path(root).resolve() for root in roots]
        for root, given in zip(self.roots, roots, strict=True):
            if not root.is_dir():
                raise AnisoscopeError(f"there is no folder {str(given)!r}; give a run folder, or one that holds runs.")

    def runs(self) -> dict[str, Path]:
        """Names and folders of the runs that are there now; a root that is a run itself goes by its own name."""
        found: dict[str, Path] = {}
        for root in self.roots:
            for path in _runs_below(root):
                inside = path.relative_to(root).as_posix()
                name = root.name if inside == "." else inside if len(self.roots) == 1 else f"{root.name}/{inside}"
                number, plain = 2, name
                while found.get(name, path) != path:
                    name, number = f"{plain} ({number})", number + 1
                found[name] = path
                if len(found) >= MOST:
                    return found
        return found

    def folder(self, name: str) -> Path:
        """The folder of a run by its name in the list."""
        runs = self.runs()
        if name not in runs:
            raise unknown_name("run", name, runs)
        return runs[name]


def _runs_below(root: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Run folders by name; not those inside a run (the arms of a study).

    Links are not followed: they lead outside, in a circle, or to a run that is found without them.
    """
    if _is_run(root):
        yield root
    elif depth:
        for name in sorted(entry.name for entry in _entries(root) if _is_folder(entry)):
            yield from _runs_below(root / name, depth - 1)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:  # not ours to read, or just deleted
        return False


def _is_run(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in _MARKS)


def version(folder: Path, *, lock: bool = False) -> str:
    """A short text that is another one whenever a run has written something; a sign of life alone is not counted.

    With `lock` the coming and going of a writer counts as well.
    """
    digest = hashlib.blake2b(digest_size=9)
    for name, stamp in sorted(_stamps(folder).items()):
        if name.endswith("lock.json"):
            if lock:
                digest.update(name.encode(errors="replace"))
            continue
        digest.update(f"{name}:{stamp};".encode(errors="replace"))
    return digest.hexdigest()


def _stamps(folder: Path, inside: str = "") -> Mapping[str, tuple[int, int]]:
    """Time and size of every file that a page is made of, of the arms of a study, too."""
    found: dict[str, tuple[int, int]] = {}
    measured = (folder / "table.parquet").is_file() or bool(_entries(folder / "parts"))
    for name in _WATCHED if measured else (*_WATCHED, _LOG):
        try:
            about = (folder / name).stat()
        except OSError:
            continue
        found[inside + name] = (about.st_mtime_ns, about.st_size)
    for name in _GROWING:
        for entry in _entries(folder / name):
            try:
                about = entry.stat()
            except OSError:
                continue
            found[f"{inside}{name}/{entry.name}"] = (about.st_mtime_ns, about.st_size)
    if not inside:
        for entry in _entries(folder / "arms"):
            found |= _stamps(Path(entry.path), f"arms/{entry.name}/")
    return found


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError:
        return []

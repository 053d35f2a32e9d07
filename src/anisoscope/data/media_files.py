"""Finding audio and image files at a path or in a dataset, one item at a time; unreadable ones are recorded."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, ClassVar, cast

import numpy as np

from anisoscope.data import text as files
from anisoscope.data.packing import refuse_bombs
from anisoscope.errors import AnisoscopeError, missing_path, refuse_special
from anisoscope.results.modality import IMAGES_DATA, MEDIA, Medium

TABLES = (".parquet", ".arrow")
_STREAM = re.compile(r"\s*<_io\.[^<>]*>")  # how libraries name an open stream in their errors
SHOWN = 5  # names that a message lists at most
CLASS = "class"  # group by what a file is an example of: its folder, or the column of a table that says so
_LABELS = ("label", "labels", "class", "category", "fine_label", "intent", "digit")
ARRAYS = "MNIST's idx files, or an .npz with images and labels."
_ARRAYS = (("images", "labels"), ("x_train", "y_train"), ("X", "y"))  # names in an .npz
_IDX = "*images*idx3*"
_TRANSCRIPTS = ("text", "transcription", "transcript", "sentence", "normalized_text")


@dataclass(frozen=True)
class Item:
    """One file, member of an archive, or value of a column; `value` is what a dataset decoded itself."""

    name: str
    group: str = ""
    open: Callable[[], BinaryIO] = field(default=io.BytesIO, repr=False)
    text: str = ""  # transcript, from a text file of the same name beside it
    value: Any = field(default=None, repr=False)


@dataclass
class MediaCounts:
    """Counts of what was read and what was skipped or dropped."""

    files: int = 0
    skipped: list[str] = field(default_factory=list)  # why each unreadable file was left out
    dropped_pieces: int = 0  # too short, or with samples that are not finite
    seconds: float = 0.0
    needed: ClassVar[bool] = True  # whether a source without a readable file is an error

    @property
    def unread(self) -> str:
        """A sentence on the number of skipped files and the reasons for the first few; empty if there are none."""
        count, more = len(self.skipped), len(self.skipped) - SHOWN
        if not count:
            return ""
        shown = "; ".join(self.skipped[:SHOWN]) + (f" and {more} more" if more > 0 else "")
        files = "1 file could not be read and was" if count == 1 else f"{count} files could not be read and were"
        return f"{files} skipped: {shown}"


def medium_of(source: str) -> Medium | None:
    """The medium that the suffix of a path, or of most files of a folder or archive, stands for; None if none does.

    >>> medium_of("a/b.WAV").name, medium_of("notes.txt")
    ('audio', None)
    """
    path = Path(source).expanduser()
    names = [path.name]
    if holds_arrays(path):
        return IMAGES_DATA
    if path.is_dir():
        names = [p.name for p in files.files_in(path)]
    elif path.suffix.lower() == ".zip" and path.is_file():
        with files.readable(str(path)), zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    counts = {medium: sum(_suffix(name) in medium.suffixes for name in names) for medium in MEDIA.values()}
    best = max(counts, key=lambda medium: counts[medium])
    return best if counts[best] else None


def items(source: str, medium: Medium, *, column: str | None = None, group_by: str | None = None) -> Iterator[Item]:
    """The items of a folder, a file, an archive, a table with a column of bytes, or a name of the `datasets` library.

    Pictures may also be arrays: MNIST's idx files, or an .npz; their labels stand for folders.

    `group_by` is `folder` (the folder a file lies in, as classes often do), `file`, a field of a dataset, or `class`
    (the folder, or the field of a dataset that is called so; empty where there is none).
    """
    path = Path(source).expanduser()
    refuse_special(path)
    if medium is IMAGES_DATA and holds_arrays(path):
        return _of_arrays(path, group_by=group_by)
    if path.is_dir():
        return _of_folder(path, medium, group_by=group_by)
    if path.suffix.lower() == ".zip" and path.is_file():
        return _of_archive(path, medium, group_by=group_by)
    if path.is_file() and _suffix(path.name) in TABLES:
        rows = (row for entry in files.entries(path) for row in files.read_records(entry, []))
        return _of_rows(str(path), rows, medium, column=column, group_by=group_by)
    if path.is_file():
        if _suffix(path.name) not in medium.suffixes:
            raise AnisoscopeError(
                f"{str(path)!r} is no file of {medium.name}; expected {', '.join(medium.suffixes[:6])}, …, a folder or "
                f".zip of such files, a {' or '.join(TABLES)} with a column of them, a datasets name, or 'embedded'"
                + (f"; or {ARRAYS}" if medium is IMAGES_DATA else ".")
            )
        return iter([_item(path, f"{path.parent.name}/{path.name}", group_by=group_by)])
    if not files.looks_like_dataset(source) or any(_suffix(source) in each.suffixes for each in MEDIA.values()):
        raise missing_path(path)
    rows = files.open_dataset(source)
    import datasets

    for name, feature in (getattr(rows, "features", None) or {}).items():
        if type(feature).__name__ == medium.feature:  # as bytes: decoding in `datasets` needs more libraries
            rows = rows.cast_column(name, getattr(datasets, medium.feature)(decode=False))
    return _of_rows(source, rows, medium, column=column, group_by=group_by)


def read_media(
    source: str, medium: Medium, decode: Callable[[Item], Iterator[Any]], *, counts: MediaCounts, **choice: Any
) -> Iterator[tuple[Any, Item]]:
    """Each decoded value with its item; a long recording has several. `choice` as in `items`.

    Items that cannot be read are skipped and named in `counts`.
    """
    for item in items(source, medium, **choice):
        values = 0
        try:
            for value in decode(item):
                values += 1
                counts.files += values == 1
                yield value, item
        except AnisoscopeError:
            raise
        except Exception as error:  # readers of damaged files raise many kinds; each is named with its file
            reason = _STREAM.sub("", str(error)).strip()
            counts.skipped.append(f"{item.name}: {reason.splitlines()[0] if reason else type(error).__name__}")
            continue
        if not values:  # readable, but without samples
            counts.files, counts.dropped_pieces = counts.files + 1, counts.dropped_pieces + 1
    if counts.files or not counts.needed:
        return
    why, count = "nothing at all", len(counts.skipped)
    if count:
        unread = "one file, not" if count == 1 else f"{count} files, none of them"
        why = f"{unread} readable; the first, {counts.skipped[0]}"
    raise AnisoscopeError(f"{source!r} holds no {medium.name} ({why}); give readable files.")


def embedded_media(
    noun: str, labelled: Iterable[tuple[Any, str]], *, group_by: str | None, counts: MediaCounts
) -> Iterator[tuple[Any, Item]]:
    """Generated values as `read_media` gives them; the label of each stands for its folder."""
    if group_by not in (None, "folder", "file", CLASS):
        raise AnisoscopeError(f"the embedded {noun}s have no field {group_by!r} to group by; group by `folder`.")
    for index, (value, label) in enumerate(labelled):
        counts.files += 1
        groups = {None: "", "folder": label, CLASS: label, "file": f"{noun}-{index}"}
        yield value, Item("embedded", groups[group_by])


def class_names(source: str, medium: Medium, *, column: str | None = None) -> list[str]:
    """The names of all classes of a source, sorted (numbers by value); [] where it states none."""
    names = {item.group for item in items(source, medium, column=column, group_by=CLASS)} - {""}
    numbers = all(name.isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name) if numbers else 0, name))


def has_columns(source: str) -> bool:
    """Whether a source has columns: a table file, or the name of a dataset.

    >>> has_columns("faces.parquet"), has_columns("org/faces"), has_columns("embedded")
    (True, True, False)
    """
    path = Path(source).expanduser()
    return source != "embedded" and (_suffix(path.name) in TABLES or not path.exists())


def _suffix(name: str) -> str:
    return PurePosixPath(name.lower()).suffix


def _of_folder(folder: Path, medium: Medium, *, group_by: str | None) -> Iterator[Item]:
    names = [path.relative_to(folder).as_posix() for path in files.files_in(folder)]
    for name in _wanted(names, medium, f"the folder {str(folder)!r}"):
        yield _item(folder / name, name, group_by=group_by)


def _item(path: Path, inside: str, *, group_by: str | None) -> Item:
    beside = path.with_suffix(".txt")
    text = beside.read_text(encoding="utf-8", errors="replace").strip() if beside.is_file() else ""
    return Item(str(path), _group(inside, group_by), partial(cast("Callable[..., BinaryIO]", open), path, "rb"), text)


def _of_archive(path: Path, medium: Medium, *, group_by: str | None) -> Iterator[Item]:
    with files.readable(str(path)), zipfile.ZipFile(path) as archive:
        members = files.members_of(archive)
        refuse_bombs(archive, members)
        for name in _wanted(members, medium, f"the archive {str(path)!r}"):
            beside = str(PurePosixPath(name).with_suffix(".txt"))
            text = archive.read(beside).decode("utf-8", errors="replace").strip() if beside in members else ""
            opener = lambda name=name: io.BytesIO(archive.read(name))  # noqa: E731
            yield Item(f"{path}:{name}", _group(name, group_by), opener, text)


def holds_arrays(path: Path) -> bool:
    """Whether a path has pictures as arrays: an .npz, an idx file of images, or a folder with such files."""
    if path.is_dir():
        return next(path.glob(_IDX), None) is not None
    return path.is_file() and (path.suffix == ".npz" or path.match(_IDX))


def _of_arrays(path: Path, *, group_by: str | None) -> Iterator[Item]:
    found = labelled_arrays(path)
    assert found is not None
    if group_by not in (None, "folder", "file", CLASS):
        raise AnisoscopeError(f"{str(path)!r} has no field {group_by!r} to group by; its labels are `folder`.")
    for number, (image, label) in enumerate(zip(*found, strict=True)):
        name = f"{path}[{number}]"
        yield Item(name, {None: "", "file": name}.get(group_by, str(label)), value=image)


def labelled_arrays(path: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """(images, labels) of an .npz or of MNIST's idx files; None if it is neither."""
    if path.suffix == ".npz":
        images, labels = _from_npz(path)
    else:
        found = [path] if path.is_file() else sorted(path.glob(_IDX)) if path.is_dir() else []
        if not found:
            return None
        label_files = [file.with_name(file.name.replace("images", "labels").replace("idx3", "idx1")) for file in found]
        images = np.concatenate([_idx(file) for file in found])
        for file, label_file in zip(found, label_files, strict=True):
            if not label_file.is_file() or label_file == file:
                raise AnisoscopeError(f"{str(file)!r} has no labels beside it; expected {label_file.name!r}.")
        labels = np.concatenate([_idx(file) for file in label_files])
    valid = images.dtype == np.uint8 and (images.ndim == 3 or (images.ndim == 4 and images.shape[3] in (1, 3)))
    if not valid or labels.shape != images.shape[:1]:
        raise AnisoscopeError(
            f"{str(path)!r} has images {images.dtype} {images.shape} and labels {labels.shape}; expected bytes [N, H, "
            "W] or [N, H, W, 3], and one label for each."
        )
    return images, labels


def _from_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with zipfile.ZipFile(path) as archive:
            refuse_bombs(archive, archive.namelist())
        with np.load(path, allow_pickle=False) as file:
            for images, labels in _ARRAYS:
                if images in file and labels in file:
                    return file[images], file[labels]
            names = ", ".join(file.files)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise AnisoscopeError(f"{str(path)!r} is no readable .npz ({error}); save it again.") from error
    raise AnisoscopeError(f"{str(path)!r} has {names or 'nothing'}; expected arrays called images and labels.")


def _idx(path: Path) -> np.ndarray:
    """Read an idx file (MNIST): two zeros, type 8, number of dimensions, the dimensions, then the bytes."""
    try:
        with next(files.entries(path)).open() as stream:
            raw = stream.read()
        if raw[:3] != b"\0\0\x08":
            raise ValueError("not an idx file of bytes")
        shape = np.frombuffer(raw, ">u4", count=raw[3], offset=4).astype(int)
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise AnisoscopeError(
            f"{str(path)!r} cannot be read as pictures ({error}); expected a folder with a folder for each class, "
            f"{ARRAYS}"
        ) from error


def _wanted(names: list[str], medium: Medium, where: str) -> list[str]:
    wanted = [name for name in names if _suffix(name) in medium.suffixes]
    if not wanted:
        seen = files.files_seen(names, none=f"none that is {medium.name}")
        raise AnisoscopeError(f"{where} holds {seen}; expected {', '.join(medium.suffixes[:6])}, ….")
    return wanted


def _group(inside: str, group_by: str | None) -> str:
    """The group of a file by its place: the folder it lies in, or the file itself.

    >>> _group("cats/one.png", "folder"), _group("one.png", "folder"), _group("cats/one.png", "file")
    ('cats', '.', 'cats/one.png')
    """
    if group_by is None:
        return ""
    if group_by == "file":
        return inside
    if group_by == CLASS:
        parent = str(PurePosixPath(inside).parent)
        return "" if parent == "." else parent
    if group_by != "folder":
        raise AnisoscopeError(f"files have no field {group_by!r} to group by; group by `folder` or `file`.")
    return str(PurePosixPath(inside).parent)


def _of_rows(
    name: str, rows: Iterable[Any], medium: Medium, *, column: str | None, group_by: str | None
) -> Iterator[Item]:
    """The items in a column of a table: bytes, paths of files, or values that a dataset decoded itself."""
    for number, record in enumerate(rows):
        place = f"{name}[{number}]"
        chosen, known = column or _column(record, medium, name), ", ".join(map(str, record))
        kind = next((name for name in _LABELS if name in record), None) if group_by == CLASS else group_by
        for wanted, option in ((chosen, "--text-field"), (kind, "--group-by")):
            if wanted is not None and wanted not in record:
                raise AnisoscopeError(
                    f"{place!r} has no column {wanted!r}; its columns are: {known}. Name one of them with {option}."
                )
        value, group = record[chosen], "" if kind is None else str(record[kind])
        text = next((record[name] for name in _TRANSCRIPTS if isinstance(record.get(name), str)), "")
        raw = value.get("bytes") if isinstance(value, dict) else value
        if isinstance(value, dict) and raw is None and value.get("path") and value.get("array") is None:
            yield Item(place, group, partial(cast("Callable[..., BinaryIO]", open), value["path"], "rb"), text)
        elif isinstance(raw, bytes):
            yield Item(place, group, partial(io.BytesIO, raw), text)
        else:
            yield Item(place, group, text=text, value=value)


def _column(record: Any, medium: Medium, name: str) -> str:
    """The column that holds the media: by its usual name, else the only one that holds bytes."""
    keys = {"bytes", "path", "array"}
    encoded = {column for column, v in record.items() if isinstance(v, dict) and keys & set(v)}
    blobs = [c for c, v in record.items() if c in encoded or isinstance(v, bytes) or hasattr(v, "convert")]
    usable = [column for column in medium.columns if column in blobs] or (blobs if len(blobs) == 1 else [])
    if not usable:
        raise AnisoscopeError(
            f"{name!r} has no column that is clearly {medium.name}; its columns are: {', '.join(map(str, record))}. "
            "Name one with --text-field."
        )
    return str(usable[0])

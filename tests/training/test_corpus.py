"""Training text: split by content, tokenised once, and batches that are a function of the seed and the step alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from anisoscope.data.enwik8 import SYMBOLS, encode, prepare_enwik8
from anisoscope.data.text import read_documents
from anisoscope.data.tokens import MASK, SEP, SPECIALS, UNK, encoded, make_vocabulary
from anisoscope.errors import AnisoscopeError
from anisoscope.training import corpus as corpus_module
from anisoscope.training.corpus import Corpus, CorpusPart, prepare_corpus
from anisoscope.training.language_model import (
    IGNORED,
    WindowStream,
    mask_tokens,
    segments,
    window_counts,
    window_starts,
)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus("embedded", tmp_path_factory.mktemp("text") / "corpus", limit=0.3)


def records(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def words(count: int, *, seed: int, length: int = 40) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join("abcdefgh"[i] * 3 for i in rng.integers(0, 8, length)) for _ in range(count)]


def texts_of(corpus: Corpus, part: CorpusPart) -> list[str]:
    return [corpus.tokenizer.decode(part.tokens[a:b]) for a, b in zip(part.starts, part.ends, strict=True)]


# -- vocabulary --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", ["char", "enwik8", "bpe:300"])
def test_ids_on_disk_are_those_of_the_saved_tokenizer(tmp_path: Path, tokens: str) -> None:
    texts = [text + " é [MASK]\n" for text in words(40, seed=0)]
    corpus = prepare_corpus(records(tmp_path / "a.jsonl", texts), tmp_path / "corpus", tokens=tokens)
    part = corpus.train
    for (start, end), text in zip(zip(part.starts, part.ends, strict=True), texts_of(corpus, part), strict=True):
        assert text in texts, "decoding gives the document back"
        assert corpus.tokenizer(text)["input_ids"] == part.tokens[start:end].tolist()
        assert MASK not in part.tokens[start:end], "a word that looks like a special token is text"
    assert corpus.tokenizer.mask_token_id == MASK and len(corpus.tokenizer) == corpus.vocab_size


def test_char_level_has_one_id_for_each_byte_of_the_training_text() -> None:
    tokenizer = make_vocabulary("char", ["naïve".encode()])
    assert tokenizer.get_vocab_size() == len(SPECIALS) + len(set("naïve".encode()))
    (ids,) = encoded([b"vane!"], tokenizer, tokens="char")
    assert ids.tolist() == tokenizer.encode("vane!").ids and ids[-1] == UNK and UNK not in ids[:-1]


def test_the_vocabulary_of_enwik8_is_the_same_for_every_text() -> None:
    vocabularies = [make_vocabulary("enwik8", documents).get_vocab() for documents in ([], [b"cat"], [bytes(SYMBOLS)])]
    assert vocabularies[0] == vocabularies[1] == vocabularies[2] and len(vocabularies[0]) == len(SPECIALS) + 205
    tokenizer = make_vocabulary("enwik8", [])
    text = "naïve 漢字\tcat\n"
    (ids,) = encoded([text.encode()], tokenizer, tokens="enwik8")
    assert (ids - len(SPECIALS)).tolist() == encode(text).tolist()
    assert ids.tolist() == tokenizer.encode(text).ids and tokenizer.decode(ids.tolist()) == text


@pytest.mark.parametrize("tokens", ["enwik8", "char"])
def test_bytes_outside_of_the_vocabulary_are_unknown_and_counted(tmp_path: Path, tokens: str) -> None:
    texts = [text + " \x7f" * 3 for text in words(40, seed=1)]
    corpus = prepare_corpus(records(tmp_path / "a.jsonl", texts), tmp_path / "corpus", tokens=tokens)
    parts = corpus.about["parts"]
    wanted = 3 if tokens == "enwik8" else 0  # `char` knows every byte of the training text
    assert [parts[name]["unknown"] for name in parts] == [wanted * parts[name]["documents"] for name in parts]
    assert int((corpus.train.tokens == UNK).sum()) == parts["train"]["unknown"]


def test_a_folder_of_prepared_enwik8_gives_what_the_raw_file_gives(tmp_path: Path) -> None:
    pages = "".join(
        f"<page><title>{i}</title><text>The '''{text}''' {{{{stub}}}}.</text></page>"
        for i, text in enumerate(words(30, seed=6))
    )
    (tmp_path / "enwik8").write_text(f"<mediawiki>{pages}</mediawiki>")
    prepare_enwik8(tmp_path / "enwik8", tmp_path / "clean")
    raw, clean = (
        prepare_corpus(str(tmp_path / name), tmp_path / f"corpus-{name}", tokens="enwik8")
        for name in ("enwik8", "clean")
    )
    assert raw.about["fingerprint"] == clean.about["fingerprint"] and raw.vocab_size == len(SPECIALS) + 205
    assert np.array_equal(raw.train.tokens, clean.train.tokens) and len(raw.train.ends) > 10


def test_bpe_is_the_same_every_time_and_other_text_gives_another() -> None:
    texts = [text.encode() for text in words(30, seed=1)]
    first, again = (make_vocabulary("bpe:290", texts).to_str() for _ in range(2))
    assert first == again
    assert first != make_vocabulary("bpe:290", [text.encode() for text in words(30, seed=2, length=7)]).to_str()


# -- split -------------------------------------------------------------------------------------------------------------


def test_the_split_depends_on_the_content_alone(tmp_path: Path) -> None:
    texts = words(300, seed=3)
    one = prepare_corpus(records(tmp_path / "a.jsonl", texts), tmp_path / "a")
    two = prepare_corpus(records(tmp_path / "b.jsonl", texts[::-1] + texts[:50]), tmp_path / "b")
    assert set(texts_of(one, one.held_out)) == set(texts_of(two, two.held_out))
    assert not set(texts_of(two, two.held_out)) & set(texts_of(two, two.train)), "equal documents stay together"
    assert 4 <= len(one.held_out.ends) <= 35, "5 % of 300 documents, binomial"


def test_a_few_documents_are_held_out_of_a_small_corpus(tmp_path: Path) -> None:
    corpus = prepare_corpus(records(tmp_path / "a.jsonl", words(24, seed=4)), tmp_path / "corpus")
    assert len(corpus.held_out.ends) == 4 and len(corpus.train.ends) == 20


def test_one_plain_file_is_split_into_sections(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("\n".join(words(100, seed=5)))
    corpus = prepare_corpus(str(tmp_path / "book.txt"), tmp_path / "corpus")
    size = corpus.about["parts"]["train"]["tokens"] + corpus.about["parts"]["held_out"]["tokens"]
    assert size == len((tmp_path / "book.txt").read_bytes()), "nothing is lost"
    assert len(corpus.held_out.ends) >= 2


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("a short note")
    with pytest.raises(AnisoscopeError, match="too little to train on"):
        prepare_corpus(str(tmp_path / "note.txt"), tmp_path / "corpus")


def test_a_wiki_export_is_cleaned_and_other_text_is_not(tmp_path: Path) -> None:
    pages = "".join(
        f"<page><title>{i}</title><text>The '''{text}''' {{{{stub}}}}.</text></page>"
        for i, text in enumerate(words(30, seed=6))
    )
    (tmp_path / "wiki.xml").write_text(f"<mediawiki>{pages}</mediawiki>")
    corpus = prepare_corpus(str(tmp_path / "wiki.xml"), tmp_path / "a")
    assert all(
        text.startswith("The ") and "'''" not in text and "stub" not in text for text in texts_of(corpus, corpus.train)
    )
    (tmp_path / "plain.txt").write_text(pages.replace("page>", "leaf>"))
    plain = prepare_corpus(str(tmp_path / "plain.txt"), tmp_path / "b")
    assert any("'''" in text for text in texts_of(plain, plain.train))


def test_the_limit_is_in_megabytes_of_text(tmp_path: Path) -> None:
    whole = sum(len(d.text.encode()) for d in read_documents("embedded"))
    corpus = prepare_corpus("embedded", tmp_path / "corpus", limit=0.1)
    assert 100_000 <= corpus.about["bytes"] < 100_000 + corpus_module.SECTION < whole


# -- cache -------------------------------------------------------------------------------------------------------------


def test_text_is_tokenised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = records(tmp_path / "a.jsonl", words(30, seed=7))
    first = prepare_corpus(source, tmp_path / "corpus")
    monkeypatch.setattr(corpus_module, "_make", lambda *_: pytest.fail("tokenised again"))
    again = prepare_corpus(source, tmp_path / "corpus")
    assert np.array_equal(first.train.tokens, again.train.tokens)
    with pytest.raises(AnisoscopeError, match="made with tokens = 'char', not 'bpe:300'"):
        prepare_corpus(source, tmp_path / "corpus", tokens="bpe:300")


def test_a_kill_while_tokenising_leaves_no_half_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = records(tmp_path / "a.jsonl", words(30, seed=8))
    real: Callable[..., dict[str, int]] = corpus_module._write_part

    def killed(folder: Path, name: str, *rest: object, **more: object) -> dict[str, int]:
        if name == "held_out":
            raise KeyboardInterrupt
        return real(folder, name, *rest, **more)

    monkeypatch.setattr(corpus_module, "_write_part", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(source, tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()
    leftover = tmp_path / ".corpus.999999999"  # of a process that was killed outright
    leftover.mkdir()
    monkeypatch.undo()
    assert prepare_corpus(source, tmp_path / "corpus").vocab_size > len(SPECIALS)
    assert not leftover.exists()


# -- windows -----------------------------------------------------------------------------------------------------------


def part_of(lengths: list[int]) -> CorpusPart:
    pieces = [np.full(n, 10 + i) for i, n in enumerate(lengths)]
    joined = np.concatenate([np.concatenate([piece, [SEP]]) for piece in pieces])[:-1]
    return CorpusPart(joined.astype(np.int32), np.cumsum(np.array(lengths) + 1) - 1)


@pytest.mark.parametrize("lengths", [[20, 9, 8], [3, 3, 20], [20, 3], [3, 20, 2], [2, 2, 2, 2], [30], [8, 1, 8, 1, 1]])
@pytest.mark.parametrize("stride", [1, 4, 8])
def test_windows_stay_inside_long_documents_and_cover_every_token(lengths: list[int], stride: int) -> None:
    part, context = part_of(lengths), 8
    starts = window_starts(part, context, stride=stride)
    covered = np.zeros(len(part.tokens), dtype=bool)
    for start in starts:
        window = part.tokens[start : start + context]
        assert len(window) == context
        covered[start : start + context] = True
        inside = {int(i) - 10 for i in window if i != SEP}
        crosses = len(inside) > 1 or SEP in window
        assert not crosses or any(lengths[i] < context for i in inside), "only short documents are packed"
    begin, end = segments(part, context)
    assert all(covered[a:b].all() for a, b in zip(begin, end, strict=True))
    assert covered[part.tokens != SEP].all()
    assert len(np.unique(starts)) == len(starts)


def test_a_part_shorter_than_one_context_is_refused() -> None:
    with pytest.raises(AnisoscopeError, match="fewer than one context of 64"):
        window_starts(part_of([20, 20]), 64, stride=32)


def test_counts_are_those_of_the_windows(embedded: Corpus) -> None:
    stream = WindowStream(embedded, 48)
    tokens, size = embedded.train.tokens, embedded.vocab_size
    weights = np.random.default_rng(0).random(len(stream.starts))
    weights /= weights.sum()
    slow = np.zeros(size)
    for start, weight in zip(stream.starts, weights, strict=True):
        for token in tokens[start : start + 48]:
            slow[token] += weight
    fast = window_counts(tokens, stream.starts, context=48, weights=weights, size=size)
    assert np.allclose(fast, slow, rtol=1e-12)
    natural = np.bincount(embedded.train.tokens, minlength=embedded.vocab_size)
    natural[: len(SPECIALS)] = 0
    assert stream.counts.dtype == np.int64 and np.array_equal(stream.counts > 0, natural > 0)
    assert np.abs(stream.counts - natural).sum() < 0.02 * natural.sum(), "only the ends of documents weigh less"


# -- batches -----------------------------------------------------------------------------------------------------------


def test_the_constant_is_fitted_on_the_targets_of_training(embedded: Corpus) -> None:
    """Next tokens are all but the first of each window, separators too; masked ones are never special tokens."""
    stream = WindowStream(embedded, 48)
    slow = np.zeros(embedded.vocab_size)
    for start in stream.starts:
        for token in embedded.train.tokens[start + 1 : start + 48]:
            slow[token] += 1
    found = stream.constant.numpy()
    assert np.allclose(found / found.sum(), slow / slow.sum(), rtol=1e-12)
    assert found.sum() == pytest.approx(embedded.about["parts"]["train"]["tokens"])
    masked = WindowStream(embedded, 48, objective="masked")
    assert torch.equal(masked.constant, torch.from_numpy(masked.counts))


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_a_batch_is_a_function_of_seed_step_and_micro_batch(embedded: Corpus, objective: str) -> None:
    def stream(seed: int = 0) -> WindowStream:
        return WindowStream(embedded, 32, objective=objective, batch_size=4, seed=seed)

    wanted = stream().batch(7, 1)
    late = stream()
    for step in (3, 9, 7):
        late.batch(step)
    again = late.batch(7, 1)
    assert all(torch.equal(wanted[name], again[name]) for name in ("input_ids", "labels"))
    for other in (stream().batch(7, 0), stream().batch(8, 1), stream(1).batch(7, 1)):
        assert not torch.equal(wanted["labels"], other["labels"])


def test_batches_are_windows_of_the_training_part_drawn_evenly(embedded: Corpus) -> None:
    stream = WindowStream(embedded, 64, batch_size=512)
    known = {embedded.train.tokens[s : s + 64].tobytes(): i for i, s in enumerate(stream.starts)}
    drawn = [
        known[row.numpy().astype(np.int16).tobytes()] for step in range(40) for row in stream.batch(step)["labels"]
    ]
    counts, mean = np.bincount(drawn, minlength=len(stream.starts)), len(drawn) / len(stream.starts)
    spread = ((counts - mean) ** 2).sum() / mean / len(counts)
    assert abs(spread - 1) < 6 * np.sqrt(2 / len(counts)), "χ² over its degrees of freedom"


def test_weighted_windows_are_drawn_by_their_weights(embedded: Corpus) -> None:
    starts = WindowStream(embedded, 64).starts
    weights = np.zeros(len(starts))
    weights[[5, 17]] = 0.75, 0.25
    stream = WindowStream(embedded, 64, batch_size=4096, weights=weights)
    rows = stream.batch(0)["input_ids"].numpy()
    first = (rows == embedded.train.tokens[starts[5] : starts[5] + 64]).all(1)
    second = (rows == embedded.train.tokens[starts[17] : starts[17] + 64]).all(1)
    assert (first | second).all()
    assert abs(first.mean() - 0.75) < 5 * np.sqrt(0.75 * 0.25 / 4096)
    assert (stream.counts > 0).sum() == len(np.unique(rows[rows >= len(SPECIALS)]))


def test_masks_hide_the_share_asked_for_in_the_usual_proportions() -> None:
    ids = torch.randint(len(SPECIALS), 1000, (400, 100), generator=torch.Generator().manual_seed(0))
    ids[:, ::10] = SEP
    found = mask_tokens(ids, torch.arange(400), vocab_size=1000, rate=0.15, seed=3)
    chosen = found["labels"] != IGNORED
    assert (chosen.sum(1) == 15).all(), "the same number in every context"
    assert not (chosen & (ids == SEP)).any()
    assert torch.equal(found["labels"][chosen], ids[chosen]) and torch.equal(found["input_ids"][~chosen], ids[~chosen])
    shown = found["input_ids"][chosen]
    masked, kept = (shown == MASK).double().mean(), (shown == ids[chosen]).double().mean()
    assert abs(masked - 0.8) < 5 * np.sqrt(0.16 / 6000) and abs(kept - 0.1) < 5 * np.sqrt(0.09 / 6000)
    noise = shown[(shown != MASK) & (shown != ids[chosen])]
    assert noise.min() >= len(SPECIALS) and noise.unique().numel() > 350, "any ordinary token"
    places = chosen.double().mean(0)[1::10]
    assert (places - 15 / 90).abs().max() < 5 * np.sqrt(0.14 / 400), "no position is preferred"


# -- probe -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_the_probe_is_held_out_distinct_and_the_same_for_every_seed(embedded: Corpus, objective: str) -> None:
    one, two = (
        WindowStream(embedded, 32, objective=objective, seed=seed).probe_batches(40, batch_size=16) for seed in (0, 5)
    )
    assert [len(batch["labels"]) for batch in one] == [16, 16, 8]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(one, two, strict=True) for name in a)
    labels, shown = (torch.cat([batch[name] for batch in one]) for name in ("labels", "input_ids"))
    original = torch.where(labels == IGNORED, shown, labels).numpy()
    assert len({row.tobytes() for row in original}) == 40
    held_out, train = (part.tokens.astype(np.int64).tobytes() for part in (embedded.held_out, embedded.train))
    assert all(row.tobytes() in held_out and row.tobytes() not in train for row in original)


def test_the_probe_repeats_no_context_of_a_repetitive_text(tmp_path: Path) -> None:
    texts = ["same text again " * 8] * 200 + words(40, seed=9)
    corpus = prepare_corpus(records(tmp_path / "a.jsonl", texts), tmp_path / "corpus")
    ids = WindowStream(corpus, 32).probe_ids(10_000)
    assert len({row.tobytes() for row in ids}) == len(ids)

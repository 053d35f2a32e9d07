"""The study Revisiting Anisotropy: what its presets train and in which tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from anisoscope.data.tokens import SPECIALS, make_vocabulary
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.frequency import OCCURRENCES, contextual_spread
from anisoscope.studies.revisiting import RevisitingConfig
from anisoscope.training.corpus import Corpus, prepare_corpus
from anisoscope.training.language_model import WindowStream


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus("embedded", tmp_path_factory.mktemp("text") / "corpus", tokens="bpe:512", limit=0.4)


def test_presets_say_tokens_seeds_and_arms() -> None:
    tiny, small = RevisitingConfig(), RevisitingConfig(preset="small")
    assert {run.training.tokens for run in tiny.runs()} == {"bpe:512"}
    assert {run.training.tokens for run in small.runs()} == {"bpe:8192"}
    assert [run.model for run in tiny.runs()] == ["decoder", "encoder", "decoder-flatloss"]
    assert {run.seed for run in small.runs()} == {0, 1, 2} and len(small.runs()) == 12
    assert small.watch["contexts"] == 1024 and tiny.watch["contexts"] == 96
    char = RevisitingConfig(tokens="char", seeds=(4,), contexts=8)
    assert {run.training.tokens for run in char.runs()} == {"char"} and char.watch["contexts"] == 8
    assert [run.seed for run in char.runs()] == [4, 4, 4]


def test_arms_are_made_of_text_and_loss() -> None:
    names = ("decoder-zipf1.50", "encoder-flat", "decoder-powerloss0.50", "encoder-flat-flatloss")
    found = {run.model: run.training for run in RevisitingConfig(arms=names).runs()}
    assert list(found) == ["decoder-zipf1.5", "encoder-flat", "decoder-powerloss0.5", "encoder-flat-flatloss"]
    assert found["decoder-zipf1.5"].frequency == "zipf:1.50" and found["decoder-zipf1.5"].target_weights == "none"
    assert found["decoder-powerloss0.5"].target_weights == "power:0.50"
    both = found["encoder-flat-flatloss"]
    assert (both.frequency, both.target_weights) == ("flat", "flat") and both.task == "masked"
    with pytest.raises(AnisoscopeError, match="power:99"):
        RevisitingConfig(arms=("decoder-powerloss99",))
    with pytest.raises(AnisoscopeError, match="decoder-lossflat"):
        RevisitingConfig(arms=("decoder-lossflat",))


def test_pieces_are_learned_on_the_training_part_alone(pieces: Corpus) -> None:
    part = pieces.train
    ends = zip(part.starts.tolist(), part.ends.tolist(), strict=True)
    texts = [pieces.tokenizer.decode(part.tokens[a:b].tolist()).encode() for a, b in ends]
    again = make_vocabulary("bpe:512", texts)
    assert again.get_vocab() == pieces.tokenizer.get_vocab(), "from the decoded training documents, the same pieces"


def test_types_that_enter_the_spread_are_those_with_ten_rows(pieces: Corpus) -> None:
    stream = WindowStream(pieces, 32)
    ids = torch.from_numpy(stream.probe_ids(96)).flatten()
    rows = torch.randn(len(ids), 4, generator=torch.Generator().manual_seed(0))
    found = contextual_spread(rows, ids, torch.from_numpy(stream.counts), order=torch.arange(len(ids)))
    seen = np.bincount(ids.numpy(), minlength=pieces.vocab_size)[len(SPECIALS) :]
    by_hand = int(((seen >= OCCURRENCES) & (stream.counts[len(SPECIALS) :] > 0)).sum())
    assert len(found.frequency) == by_hand > 50
    letters = WindowStream(prepare_corpus("embedded", pieces.path.parent / "letters", limit=0.4), 32)
    few = np.bincount(letters.probe_ids(96).ravel(), minlength=letters.corpus.vocab_size)
    assert by_hand > 1.5 * (few >= OCCURRENCES).sum(), "more than characters would give"

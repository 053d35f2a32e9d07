"""What `tools/real_models.py` makes of weights and tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

real_inputs = pytest.importorskip("real_inputs")


def test_a_second_rounding_has_sixteen_steps_a_block_and_changes_nothing_twice() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    once = real_inputs.rounded(weight)
    assert max(len(block.unique()) for block in once.reshape(-1, real_inputs.BLOCK)) <= 16
    torch.testing.assert_close(real_inputs.rounded(once), once)
    assert 0.02 < float((once - weight).norm() / weight.norm()) < 0.2
    assert not real_inputs.rounded(torch.zeros(1, 32)).any()


def test_reactions_are_read_atom_by_atom(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"CO()=.c1", ">>", "Br", "[nH]"]
    source = tmp_path / "source"
    source.mkdir()
    (source / "vocab.txt").write_text("\n".join(words))
    (source / "config.json").write_text("{}")
    made = real_inputs.smiles(source, tmp_path / "made")
    ids = AutoTokenizer.from_pretrained(made)("CBr(=O).c1[nH]>>C")["input_ids"]
    assert [words[i] for i in ids] == ["[CLS]", "C", "Br", *"(=O).c1", "[nH]", ">>", "C", "[SEP]"]
    assert '"model_type": "bert"' in (made / "config.json").read_text()

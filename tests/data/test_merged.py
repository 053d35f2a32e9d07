"""The merged corpus: sources with equal shares, in an order that depends on nothing but their texts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anisoscope.data import text as files
from anisoscope.data.text import BEGINNING, MERGED_SOURCES, data_version, merged_sources, read_documents
from anisoscope.errors import AnisoscopeError
from anisoscope.series import SweepConfig
from anisoscope.series.sweep import Sweeper
from support.tiny_series import LOOK, gpt


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """Three of the sources: many short texts, a few middling ones, and two very long ones."""
    (tmp_path / "shelf" / "c4").mkdir(parents=True)
    records = [json.dumps({"text": f"short text number {n} " + "web " * 20}) for n in range(400)]
    (tmp_path / "shelf" / "c4" / "some.jsonl").write_text("\n".join(records))
    (tmp_path / "shelf" / "wikipedia.jsonl").write_text(
        "\n".join(json.dumps({"text": f"article {n} " + "encyclopaedia " * 100}) for n in range(20))
    )
    (tmp_path / "shelf" / "arxiv").mkdir()
    for n in range(2):
        (tmp_path / "shelf" / "arxiv" / f"{n}.txt").write_text(f"paper {n} " + "we prove it " * 5000)
    return tmp_path / "shelf"


def test_shares_are_equal_and_documents_are_beginnings(shelf: Path) -> None:
    found = list(read_documents(f"merged:{shelf}"))
    share: Counter[str] = Counter()
    for document in found:
        share[document.source] += len(document.text)
        assert len(document.text) <= BEGINNING
    assert set(share) == {"c4", "wikipedia", "arxiv"}
    assert max(share.values()) - min(share.values()) <= BEGINNING, "to within a document"
    assert found == list(read_documents(f"merged:{shelf}")), "the same order every time"
    assert sum(document.source == "arxiv" for document in found) == 2, "it ends with its shortest source"


def test_sources_can_be_named_one_by_one_and_are_groups(shelf: Path) -> None:
    name = f"merged:{shelf / 'wikipedia.jsonl'},{shelf / 'c4'}"
    assert [document.source for document in read_documents(name)][:2] == ["wikipedia", "c4"]
    grouped = {document.group for document in read_documents(name, group_by="file")}
    assert grouped == {"wikipedia", "c4"}
    with pytest.raises(AnisoscopeError, match="grouped by `file`, not by 'url'"):
        read_documents(name, group_by="url").__next__()
    with pytest.raises(AnisoscopeError, match=r"'c4' of .* is named twice"):
        merged_sources(f"merged:{shelf / 'c4'},{shelf / 'c4'}")


def test_what_is_not_here_is_asked_of_the_hub_each_with_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def opened(name: str) -> Iterator[dict[str, Any]]:
        asked.append(name)
        field = next(field for source, field in MERGED_SOURCES.values() if source == name)
        return iter([{field: f"{name} {n}"} for n in range(3)])

    monkeypatch.setattr(files, "open_dataset", opened)
    found = list(read_documents("merged"))
    assert set(asked) == {source for source, _ in MERGED_SOURCES.values()} and len(asked) == 5
    assert {document.source for document in found} == set(MERGED_SOURCES)


def test_a_source_that_cannot_be_had_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> Any:
        raise AnisoscopeError(f"{name!r} cannot be loaded (offline); check the spelling.")

    monkeypatch.setattr(files, "open_dataset", refused)
    with pytest.raises(AnisoscopeError, match=r"^the source 'c4' of 'merged' cannot be had \('allenai/c4:en' cannot"):
        next(read_documents("merged"))
    with pytest.raises(
        AnisoscopeError, match="holds no source of a merged corpus; expected files or folders called c4"
    ):
        next(read_documents(f"merged:{tmp_path}"))


def test_a_sweep_reads_it_and_run_json_names_its_sources(shelf: Path, tmp_path: Path) -> None:
    gpt().save_pretrained(tmp_path / "series" / "checkpoint-1")
    config = SweepConfig(str(tmp_path / "series"), **LOOK | {"data": f"merged:{shelf}"})
    Sweeper.at(config, tmp_path / "out", resume=False).run()
    data = json.loads((tmp_path / "out" / "run.json").read_text())["data"]
    assert list(data["sources"]) == ["c4", "wikipedia", "arxiv"] and data["fingerprint"] and data["tokens"] >= 320


def test_versions_of_data_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert data_version("embedded")["version"].startswith("anisoscope ")
    assert data_version(str(tmp_path)) == {}, "local files are told by the fingerprint of what was read"
    monkeypatch.setattr(files, "hub_reachable", lambda *_: True)
    monkeypatch.setattr(files, "dataset_commit", lambda name, *, online: f"commit of {name}")
    assert data_version("wikimedia/wikipedia:20231101.en") == {"commit": "commit of wikimedia/wikipedia"}
    assert data_version("merged:c4")["sources"] == {"c4": {"name": "allenai/c4:en", "commit": "commit of allenai/c4"}}

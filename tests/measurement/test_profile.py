"""The run folder and comparisons: nothing half-written, nothing lost, the same table after any interruption."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.measurement import profile as profiles
from anisoscope.measurement.bank import Bank, load_bank, save_bank
from anisoscope.measurement.profile import ProfileConfig, first_use, make_ready
from anisoscope.metrics.catalogue import registry
from anisoscope.results.folder import RunFolder, replace_file
from anisoscope.results.query import Table, variant_name
from anisoscope.view.figure import Figure
from anisoscope.view.page import Fold
from anisoscope.view.sections.profiles import profiles_section
from anisoscope.view.subjects import ProfileRows, RunView
from anisoscope.view.words import Catalogue
from support.tiny_profiles import config


def test_a_failing_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    replace_file(path, lambda p: p.write_text("old"))

    def fail(beside: Path) -> None:
        beside.write_text("half of the new")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_file(path, fail)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
    replace_file(path, lambda p: p.write_text("new"))
    assert path.read_text() == "new", "the counter-test: a write that works replaces it"


def test_a_failing_table_leaves_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    folder = RunFolder(tmp_path)
    old = Table.from_records([{"metric": "a", "value": 1.0}])
    folder.write_table(old)

    def broken(table: Any, path: Path) -> None:
        Path(path).write_bytes(b"PAR1 not much more")
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", broken)
    with pytest.raises(OSError, match="disk full"):
        folder.write_table(Table.from_records([{"metric": "b", "value": 2.0}]))
    assert folder.table().value(metric="a") == 1.0


def test_a_folder_with_other_files_or_another_run_is_refused(tmp_path: Path, whole_profile: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(AnisoscopeError, match=r"thesis\.tex"):
        RunFolder.create(tmp_path, {}, resume=False)
    with pytest.raises(AnisoscopeError, match="holds a run"):
        RunFolder.create(whole_profile, {}, resume=False)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert RunFolder.create(tmp_path / "new" / "deep", {}, resume=False).path.is_dir()


def test_resuming_with_other_settings_is_refused_and_names_the_setting(prose: Path, whole_profile: Path) -> None:
    with pytest.raises(AnisoscopeError, match="batch_size = 4, not 5"):
        RunFolder.create(whole_profile, asdict(config(prose, batch_size=5)), resume=True)
    assert RunFolder.create(whole_profile, asdict(config(prose)), resume=True).path == whole_profile


def test_a_file_or_a_missing_run_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AnisoscopeError, match="is a file"):
        RunFolder.create(tmp_path / "file", {}, resume=False)
    with pytest.raises(AnisoscopeError, match="does not exist"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(AnisoscopeError, match=r"run\.json"):
        RunFolder.open(tmp_path)
    (tmp_path / "run.json").write_text("{ not json")
    with pytest.raises(AnisoscopeError, match="JSON"):
        RunFolder.open(tmp_path).about()
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(AnisoscopeError, match="no table"):
        RunFolder.open(tmp_path).table()
    (tmp_path / "table.parquet").write_bytes(b"PAR1")
    with pytest.raises(AnisoscopeError, match="table"):
        RunFolder.open(tmp_path).table()


def test_a_run_says_what_it_was(whole_profile: Path) -> None:
    folder = RunFolder.open(whole_profile)
    about = folder.about()
    assert about["status"] == "complete"
    assert about["seed"] == 0
    assert {"torch", "transformers", "python"} <= set(about["versions"])
    (model,) = about["models"]
    assert model["data"]["fingerprint"]
    assert model["fingerprint"]
    assert model["contexts"] == model["data"]["contexts"] > 40
    assert not (whole_profile / "partial").exists()
    arrays = folder.arrays(model["key"])
    assert {"0.embed/rows", "0.embed/keys", "1.resid/spectrum"} <= set(arrays)
    table = folder.table()
    assert {row["model"] for row in table.records()} == {model["name"]}
    assert len(table.finite()) > 100


def test_partial_statistics_come_back_as_they_were(tmp_path: Path) -> None:
    from anisoscope.capture import Batch, Capture, find_layout
    from anisoscope.measurement.bank import make_plan
    from anisoscope.metrics.catalogue import parse_requests
    from support.measured import same_states
    from support.tiny_models import contexts, padded, tiny

    model = tiny("gpt2", dtype=torch.float64)
    layout = find_layout(model)
    plan = make_plan(parse_requests(["all"]), ["resid", "scores"], seed=0, sample_size=64, attention_rows=4)
    bank, folder = Bank(plan), RunFolder(tmp_path)
    with Capture(model, layout.sites(["resid", "scores"]), bank, layout=layout) as capture:
        capture.run(Batch(padded(contexts(12, 9)), groups=("a", "b")))
    path = folder.partial_path("m")
    assert load_bank(path, plan) is None
    save_bank(path, bank, {"batches": 1})
    found = load_bank(path, plan)
    assert found is not None
    loaded, progress = found
    assert progress == {"batches": 1}
    assert loaded.groups == bank.groups
    same_states(bank.state(), loaded.state())


def test_variants_have_one_spelling() -> None:
    assert variant_name({"b": True, "a": 0.5}) == "a=0.5;b=1"
    assert variant_name({}) == ""


def test_variants_beside_default_metrics_are_in_the_table_and_folded_away_on_the_page(whole_profile: Path) -> None:
    table = RunFolder(whole_profile).table()
    for metric, variant in (("average_cosine", "pairs=between"), ("participation_ratio", "clusters=1")):
        beside = table.where(metric=metric, variant=variant).finite()
        assert len(beside) == len(table.where(metric=metric, variant="", kind=["embed", "resid", "final"]))
        assert set(beside.arrow["kind"].to_pylist()) == {"embed", "resid", "final"}, "not at heads"
    section = profiles_section(ProfileRows([RunView(table, table.about)]), Catalogue(registry()))
    shown = [panel.title for part in section.parts if isinstance(part, Figure) for panel in part.panels]
    folded = [panel.title for part in section.parts if isinstance(part, Fold) for figure in part.parts
              if isinstance(figure, Figure) for panel in figure.panels]  # fmt: skip
    assert not any("between" in title or "clusters" in title for title in shown)
    assert {"Average cosine · pairs=between", "Participation ratio · clusters=1"} <= set(folded)


def test_a_device_is_made_ready_without_a_trace() -> None:
    """In a thread beside the host's imports: random numbers, threads and precisions are as before."""
    assert make_ready("cpu") is None and (torch.cuda.is_available() or make_ready("auto") is None)
    before = torch.get_rng_state(), torch.get_num_threads(), torch.get_float32_matmul_precision()
    first_use("cpu")
    first_use("no device")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == before[1:]


def test_a_profile_waits_for_the_device_before_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    class Ready:
        def join(self) -> None:
            waited.append("joined")

    monkeypatch.setattr(profiles, "make_ready", lambda device: Ready())
    measured = profiles.ModelPasses.run
    monkeypatch.setattr(profiles.ModelPasses, "run", lambda self: (waited.append("measured"), measured(self))[1])
    config = ProfileConfig(("gpt2:n_layer=1,n_embd=16,n_head=2,vocab_size=300",), random_init=True, tokens=256)
    profiles.Profiler(config, RunFolder.create(tmp_path / "run", {}, resume=False)).run()
    assert waited == ["joined", "measured"]

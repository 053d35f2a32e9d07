"""What a series can be, in which order, and what its weights say about that order."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.models.downloads import Downloads, log_spaced_steps
from anisoscope.models.load import load_model
from anisoscope.series import integrity
from anisoscope.series.discovery import find_series, named_step, recorded_step, step_of
from anisoscope.series.integrity import MARGIN, Distances, distances, distances_of, exchanges, saving, sketch
from support.tiny_series import ARCHITECTURE, Hub, gpt, make_series, moved, put


def series(*models: object, revisions: tuple[str, ...] = (), architecture: str | None = None) -> list[tuple[int, str]]:
    found = find_series([str(m) for m in models], revisions, architecture=architecture)
    return [(c.step if c.step is not None else -1, c.label) for c in found.checkpoints]


# names and orders


def test_steps_are_read_from_names() -> None:
    names = {"checkpoint-500": 500, "step3000-tokens6B": 3000, "TinyLlama-1.1B-step-50K-105b": 50_000, "main": None}
    assert {name: named_step(name) for name in names} == names
    assert named_step("epoch=3-step=1000") == 1000 and named_step("llama-7b") is None and step_of("epoch=3") == 3


def test_folders_come_in_the_order_of_steps_not_of_letters(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-100", "checkpoint-20", "other", ".checkpoint-5.123"):
        (tmp_path / name).mkdir()
    assert series(tmp_path) == [(9, "checkpoint-9"), (20, "checkpoint-20"), (100, "checkpoint-100")]
    shutil.copytree(tmp_path, tmp_path / "run" / "checkpoints")
    assert series(tmp_path / "run") == series(tmp_path), "the folder of a training run, too"


def test_several_models_have_their_own_steps_or_the_order_given(tmp_path: Path) -> None:
    for name in ("bert_pretrained", "bert_ft", "net-step-200", "net-step-100", "llama-7b", "llama-13b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    given = find_series([str(tmp_path / "bert_pretrained"), str(tmp_path / "bert_ft")])
    assert [c.step for c in given.checkpoints] == [0, 1] and not given.timed and given.name == "bert"
    assert "order they were given" in given.notes[0]
    named = find_series([str(tmp_path / "net-step-200"), str(tmp_path / "net-step-100")])
    assert [c.step for c in named.checkpoints] == [100, 200] and named.timed and not named.notes
    assert [c.late for c in named.checkpoints] == [True, False]
    sizes = find_series([str(tmp_path / "llama-7b"), str(tmp_path / "llama-13b")])
    assert [c.step for c in sizes.checkpoints] == [0, 1], "a size is no step"


def test_files_are_a_series_of_a_given_architecture_and_last_is_no_step_of_its_own(tmp_path: Path) -> None:
    for name, step in (("epoch=0-step=50", 50), ("epoch=1-step=100", 100), ("last", 100)):
        torch.save({"state_dict": {"a": torch.zeros(1)}, "global_step": step}, tmp_path / f"{name}.ckpt")
    torch.save({"a": torch.zeros(1)}, tmp_path / "optimizer.pt")
    found = find_series([str(tmp_path)], architecture=ARCHITECTURE)
    assert [(c.step, c.label) for c in found.checkpoints] == [(50, "epoch=0-step=50"), (100, "epoch=1-step=100")]
    assert found.notes == ["last.ckpt was left out: it is of a step that another checkpoint has"]
    with pytest.raises(AnisoscopeError, match="--architecture"):
        find_series([str(tmp_path)])
    (tmp_path / "epoch=1-step=100.ckpt").unlink()
    assert series(tmp_path, architecture=ARCHITECTURE)[-1] == (100, "last"), "now it is the only one of its step"


def test_an_architecture_is_refused_for_checkpoints_that_have_one(tmp_path: Path) -> None:
    for name in ("checkpoint-1", "checkpoint-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    assert series(tmp_path) == [(1, "checkpoint-1"), (2, "checkpoint-2")]
    with pytest.raises(AnisoscopeError, match="--architecture does nothing for checkpoints that come with a config"):
        series(tmp_path, architecture=ARCHITECTURE)
    with pytest.raises(AnisoscopeError, match="--architecture does nothing"):
        series("org/name", revisions=("step0", "step1"), architecture=ARCHITECTURE)
    (tmp_path / "checkpoint-2" / "config.json").unlink()
    torch.save({"a": torch.zeros(1)}, tmp_path / "checkpoint-2" / "pytorch_model.bin")
    assert [step for step, _ in series(tmp_path, architecture=ARCHITECTURE)] == [1, 2], "one of them needs it"


def test_a_step_inside_a_file_counts_where_its_name_says_none(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.zeros(1)}, "iter_num": 7}, tmp_path / "early.pt")
    torch.save({"model": {"a": torch.zeros(1)}, "iter_num": 300}, tmp_path / "a.pt")
    assert series(tmp_path / "early.pt", tmp_path / "a.pt", architecture=ARCHITECTURE) == [(0, "early.pt"), (1, "a.pt")]
    assert [step for step, _ in series(tmp_path, architecture=ARCHITECTURE)] == [7, 300]
    assert recorded_step(str(tmp_path / "a.pt")) == 300


def test_files_without_any_step_are_named_and_beside_others_left_out(tmp_path: Path) -> None:
    for name in ("x.pt", "y.pt"):
        torch.save({"a": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(AnisoscopeError, match=r"x.pt, y.pt name no step and hold none inside; rename them \(model_100"):
        series(tmp_path, architecture=ARCHITECTURE)
    (tmp_path / "last.ckpt").write_bytes(b"hello")
    with pytest.raises(AnisoscopeError, match=r"last\.ckpt names no step and holds none inside; rename it"):
        series(tmp_path, architecture=ARCHITECTURE)
    torch.save({"a": torch.zeros(1)}, tmp_path / "model_100.pt")
    found = find_series([str(tmp_path)], architecture=ARCHITECTURE)
    assert [c.step for c in found.checkpoints] == [100] and found.notes[0].startswith("last.ckpt was left out")


def test_trainers_write_their_step_beside_the_weights(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "state.json").write_text(json.dumps({"step": 4}))
    assert recorded_step(str(tmp_path)) == 4
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 500}))
    assert recorded_step(str(tmp_path)) == 500
    (tmp_path / "trainer_state.json").write_text("{")
    assert recorded_step(str(tmp_path)) == 4


def test_what_is_no_series_is_said_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for models, words in (
        ([tmp_path / "no"], "no folder here"),
        ([tmp_path / "empty"], "holds no checkpoint-N"),
        ([tmp_path / "empty", tmp_path / "empty"], "not a model"),
    ):
        with pytest.raises(AnisoscopeError, match=words):
            find_series([str(m) for m in models])
    with pytest.raises(AnisoscopeError, match="no revisions"):
        find_series([str(tmp_path)], ("step0",))
    with pytest.raises(AnisoscopeError, match="one hub model"):
        find_series(["a/b", "c/d"], ("step0",))
    with pytest.raises(AnisoscopeError, match="names no training step"):
        find_series(["a/b"], ("main",))
    with pytest.raises(AnisoscopeError, match="named twice"):
        find_series(["a/b"], ("step1", "iter_1"))


# the hub


def test_all_and_log_are_the_revisions_that_name_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (0, 1, 2, *range(1000, 40_000, 1000)):
        (tmp_path / "repo" / f"step{step}").mkdir(parents=True)
    Hub(tmp_path / "repo", tmp_path / "cache").install(monkeypatch)
    everything = series("org/tiny", revisions=("all",))
    assert len(everything) == 42 and everything[0] == (0, "step0") and everything[-1] == (39_000, "step39000")
    few = [step for step, _ in series("org/tiny", revisions=("log",))]
    assert 8 <= len(few) <= 16 and few[:3] == [0, 1, 2] and few[-1] == 39_000 and set(few) <= {s for s, _ in everything}
    assert [step for step, _ in series("org/tiny", revisions=("step2", "step0"))] == [0, 2]
    assert log_spaced_steps(range(5)) == [0, 1, 2, 3, 4]


def test_offline_the_cache_tells_the_revisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anisoscope.models import source as sources

    Hub(tmp_path, tmp_path / "cache").install(monkeypatch)
    monkeypatch.setattr(sources, "hub_reachable", lambda *_: False)
    refs = tmp_path / "cache" / "models--org--tiny" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("x")
    with pytest.raises(AnisoscopeError, match=r"^the hub cannot be reached, and no revision of 'org/tiny'"):
        series("org/tiny", revisions=("all",))
    (refs / "step5").write_text("x")
    found = find_series(["org/tiny"], ("all",))
    assert [c.label for c in found.checkpoints] == ["step5"] and "hub cannot be reached" in found.notes[0]
    monkeypatch.setattr(sources, "hub_reachable", lambda *_: True)
    with pytest.raises(AnisoscopeError, match=r"^no revision of 'org/tiny' names a step"):
        series("org/tiny", revisions=("all",))


def test_names_given_after_a_word_stand_in_where_the_hub_tells_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Online those that are there, spaced; offline those in the cache; else the list. A note says which."""
    from anisoscope.models import source as sources

    for step in range(1000, 33_000, 1000):
        (tmp_path / "repo" / f"global_step{step}").mkdir(parents=True)
    hub = Hub(tmp_path / "repo", tmp_path / "cache").install(monkeypatch)
    asked = ("log:4", "global_step1000", "global_step99000")
    found = find_series(["org/tiny"], asked)
    assert [c.step for c in found.checkpoints] == [1000, 3000, 10_000, 32_000]
    assert found.notes[0] == "global_step99000 of org/tiny is not on the hub"
    assert found.notes[1] == "revisions are 4 of the 32 that the hub has of org/tiny"

    def refused(repo_id: str) -> None:
        raise OSError("403 Forbidden: access is restricted")

    monkeypatch.setattr(hub, "list_repo_refs", refused)
    found = find_series(["org/tiny"], asked)
    assert [c.label for c in found.checkpoints] == list(asked[1:])
    assert found.notes[0].startswith(
        "revisions are the 2 of a fixed list: the revisions of 'org/tiny' cannot be listed"
    )
    with pytest.raises(AnisoscopeError, match="403 Forbidden"):
        find_series(["org/tiny"], ("log:4",))
    monkeypatch.setattr(sources, "hub_reachable", lambda *_: False)
    found = find_series(["org/tiny"], asked)
    assert [c.label for c in found.checkpoints] == list(asked[1:])
    assert found.notes[0].startswith("revisions are the 2 of a fixed list: the hub cannot be reached")
    refs = tmp_path / "cache" / "models--org--tiny" / "refs"
    refs.mkdir(parents=True)
    (refs / "global_step5000").write_text("x")
    assert [c.step for c in find_series(["org/tiny"], asked).checkpoints] == [5000], "what can be had"


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step738020-tokens3094B", 738_020),
        ("step-2560000", 2_560_000),
        ("global_step1000", 1000),
        ("step10000", 10_000),
        ("step_20k", 20_000),
        ("step-480k-token-1007B", 480_000),
        ("TinyLlama-1.1B-intermediate-step-1431k-3T", 1_431_000),
        ("stage1-step-40000", 40_000),
    ],
)
def test_names_of_published_checkpoints_tell_their_steps(name: str, step: int) -> None:
    assert named_step(name) == step


def test_the_next_revision_is_fetched_while_one_is_used_and_only_ours_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["step0", "step1", "step2"]
    for name in names:
        (tmp_path / "repo" / name).mkdir(parents=True)
    hub = Hub(tmp_path / "repo", tmp_path / "cache").install(monkeypatch)
    hub.snapshot_download("org/tiny", revision="step1")  # the user's own, from before
    hub.fetched.clear()
    downloads = Downloads("org/tiny", names, tmp_path / "journal.json", remove=True)
    assert downloads.ready("step0") is not None
    downloads.fetches["step1"].result()
    assert hub.fetched == ["step0", "step1"], "one ahead, not two"
    for name in names:
        downloads.ready(name)
        downloads.finished(name)
    assert hub.deleted == ["step0", "step2"]


def test_a_kill_during_a_download_does_not_make_it_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repo" / "step0").mkdir(parents=True)
    hub = Hub(tmp_path / "repo", tmp_path / "cache").install(monkeypatch)
    first = Downloads("org/tiny", ["step0"], tmp_path / "journal.json", remove=True)
    first.ready("step0")  # and then the machine went down
    second = Downloads("org/tiny", ["step0"], tmp_path / "journal.json", remove=True)
    second.ready("step0")
    second.finished("step0")
    assert hub.deleted == ["step0"]


def test_a_download_that_fails_is_one_sentence_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("step0", "step1"):
        (tmp_path / "repo" / name).mkdir(parents=True)
    hub = Hub(tmp_path / "repo", tmp_path / "cache").install(monkeypatch)
    hub.broken = {"step0"}
    downloads = Downloads("org/tiny", ["step0", "step1"], tmp_path / "journal.json")
    with pytest.raises(AnisoscopeError, match=r"could not be downloaded \(the connection broke"):
        downloads.ready("step0")
    assert downloads.ready("step1") is not None


# what a checkpoint lacks


def test_the_tokenizer_may_lie_in_the_folder_above(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    make_series(tmp_path, (10,))
    with pytest.raises(AnisoscopeError, match="comes without a tokenizer"):
        load_model(str(tmp_path / "checkpoint-10"), device="cpu")
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "a": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    assert len(load_model(str(tmp_path / "checkpoint-10"), device="cpu").tokenizer) == 3
    torch.save(gpt().state_dict(), tmp_path / "step=5.pt")
    assert len(load_model(str(tmp_path / "step=5.pt"), architecture=ARCHITECTURE, device="cpu").tokenizer) == 3


def test_parts_that_a_checkpoint_lacks_are_the_same_at_every_load(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(**sizes, vocab_size=300), add_pooling_layer=False).save_pretrained(tmp_path)
    prints = {load_model(str(tmp_path), device="cpu", need_tokenizer=False).fingerprint for _ in range(2)}
    assert len(prints) == 1


# the order of weights


def path_of(model: object, steps: list[int]) -> Distances:
    found = []
    for weights in moved(model, steps):
        found.append({name: value.reshape(-1) for name, value in weights.items()})
    path = distances(found)
    assert path is not None and MARGIN <= path.margin < 0.03
    return path


@pytest.mark.parametrize("steps", [[0, 1, 2, 4, 8, 16, 32, 64], [0, 10, 20, 30, 40, 50], [0, 16, 32, 500, 512, 1000]])
def test_every_swapped_pair_is_found_and_no_honest_series_is_flagged(steps: list[int]) -> None:
    path = path_of(gpt(), steps)
    assert exchanges(path.d, path.margin) == []
    for i in range(len(steps)):
        for j in range(i + 1, len(steps)):
            order = list(range(len(steps)))
            order[i], order[j] = order[j], order[i]
            assert [(e.first, e.second) for e in exchanges(path.d[order][:, order], path.margin)] == [(i, j)]


def test_two_swapped_pairs_are_both_found() -> None:
    d = path_of(gpt(), list(range(0, 120, 10))).d
    order = [0, 2, 1, 3, 4, 5, 6, 9, 8, 7, 10, 11]
    assert {(e.first, e.second) for e in exchanges(d[order][:, order])} == {(1, 2), (7, 9)}


def test_weights_that_only_tremble_have_no_order() -> None:
    for size in (500, 5000):
        rows = torch.randn(12, size, generator=torch.Generator().manual_seed(0))
        path = distances([{"w": row} for row in rows])
        assert path is not None and path.entries == pytest.approx(size, rel=0.3)
        assert exchanges(path.d, path.margin) == []
        best = max(saving(path.d, list(range(12)), i, j) for i in range(12) for j in range(i + 1, 12))
        assert 0 < best < path.margin, "without a margin one would be flagged"


def test_a_sketch_is_the_same_sample_of_every_model_and_keeps_distances() -> None:
    first, second = gpt(0), gpt(1)
    whole, few = (
        [sketch(model, size) for model in (first, second, put(gpt(0), moved(first, [1, 5])[1]))]
        for size in (1 << 18, 2000)
    )
    assert sum(len(v) for v in few[0].values()) <= 2000 < sum(len(v) for v in whole[0].values())
    assert {n: len(v) for n, v in few[0].items()} == {n: len(v) for n, v in few[1].items()}
    d, e = distances(whole), distances(few)
    assert d is not None and e is not None
    scale = (sum(len(v) for v in whole[0].values()) / sum(len(v) for v in few[0].values())) ** 0.5
    assert torch.allclose(d.d, e.d * scale, rtol=0.15)


def test_models_of_other_sizes_are_not_compared() -> None:
    sketches = [sketch(gpt()), sketch(gpt(1)), sketch(gpt(2, n_embd=32))]
    assert distances(sketches) is None and distances([sketches[0], sketches[1], sketches[0]]) is not None


def test_the_order_of_three_hundred_checkpoints_is_checked_with_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    walk = (torch.randn(300, 4000, generator=generator) + 0.3).cumsum(0)
    order = list(range(300))
    order[100], order[120] = order[120], order[100]
    read: list[int] = []

    def sketch_of(number: int) -> dict[str, torch.Tensor]:
        read.append(number)
        return {"w": walk[order[number]]}

    path = distances_of(300, sketch_of)
    assert path is not None and [(e.first, e.second) for e in exchanges(path.d, path.margin)] == [(100, 120)]
    assert len(read) == 600, "each is read twice, and held once"
    exact = {"compute_mode": "donot_use_mm_for_euclid_dist"}  # by products cdist gives 1e-4 on the diagonal
    plain = torch.cdist(walk[order].double(), walk[order].double(), **exact)
    assert torch.allclose(path.d, plain, rtol=1e-9, atol=1e-6)
    monkeypatch.setattr(integrity, "HELD", 300 * 1000)
    few = distances_of(300, sketch_of)
    assert few is not None and [(e.first, e.second) for e in exchanges(few.d, few.margin)] == [(100, 120)]


def test_the_gain_of_every_exchange_is_that_of_the_paths() -> None:
    points = torch.randn(7, 3, generator=torch.Generator().manual_seed(1)).double()
    d = torch.cdist(points, points)
    gains = integrity._shortenings(d)

    def length(order: list[int]) -> float:
        return sum(float(d[a, b]) for a, b in itertools.pairwise(order))

    for i, j in itertools.combinations(range(7), 2):
        swapped = list(range(7))
        swapped[i], swapped[j] = j, i
        assert float(gains[i, j]) == pytest.approx(length(list(range(7))) - length(swapped))


# stages of post-training


def stored(folder: Path, *, config: str = "config.json") -> Path:
    folder.mkdir(parents=True)
    (folder / config).write_text("{}")
    return folder


@pytest.fixture
def stages(tmp_path: Path) -> list[Path]:
    """A model, its fine-tuning with three checkpoints, and an adapter for preferences with two."""
    found = [
        stored(tmp_path / "base"),
        stored(tmp_path / "sft"),
        stored(tmp_path / "dpo", config="adapter_config.json"),
    ]
    for step in (20, 100, 60):
        stored(tmp_path / "sft" / f"checkpoint-{step}")
    for step in (5, 10):
        adapter = stored(tmp_path / "dpo" / f"checkpoint-{step}", config="adapter_config.json")
        for name in ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
            (adapter / name).touch()
    return found


def test_stages_follow_each_other_and_their_steps_add_up(stages: list[Path]) -> None:
    assert series(*stages) == [(0, "base"), (100, "sft"), (110, "dpo")]
    found = find_series([str(stage) for stage in stages], inner=True)
    assert [(c.step, c.label) for c in found.checkpoints] == [
        (0, "base"), (20, "sft/checkpoint-20"), (60, "sft/checkpoint-60"), (100, "sft/checkpoint-100"),
        (105, "dpo/checkpoint-5"), (110, "dpo/checkpoint-10"),
    ]  # fmt: skip
    assert found.timed and found.name == "base…dpo" and "sft at 0, dpo at 100" in found.notes[0]
    assert not any(c.late for c in found.checkpoints)


def test_a_checkpoint_of_a_later_stage_is_later_whatever_its_number(stages: list[Path]) -> None:
    base, sft, dpo = stages
    assert series(sft / "checkpoint-60", dpo / "checkpoint-5") == [(60, "sft/checkpoint-60"), (105, "dpo/checkpoint-5")]
    (sft / "config.json").unlink()  # only its checkpoints are left
    assert [step for step, _ in series(base, sft, dpo)] == [0, 20, 60, 100, 110]
    assert [step for step, _ in series(sft / "checkpoint-100", sft / "checkpoint-20")] == [20, 100], "of one stage"


def test_without_a_step_of_every_stage_the_order_counts(stages: list[Path], tmp_path: Path) -> None:
    merged = stored(tmp_path / "merged")
    found = find_series([str(model) for model in (*stages, merged)])
    assert [c.step for c in found.checkpoints] == [0, 1, 2, 3] and not found.timed
    assert "order they were given" in found.notes[0]

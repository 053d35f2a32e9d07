"""Every family builds from one row, learns, and starts from weights that only its seed decides."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.models.load import load_model
from anisoscope.training.config import FAMILIES, TrainableFamily, TrainConfig, checkpoint_steps, choose_family
from anisoscope.training.corpus import Corpus, prepare_corpus
from anisoscope.training.language_model import WindowStream, build_model
from anisoscope.training.loop import make_optimizer
from anisoscope.training.run_files import Checkpoints

SIZES = {"layers": 2, "width": 32, "heads": 2, "context": 32, "device": "cpu"}


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus("embedded", tmp_path_factory.mktemp("text") / "corpus", limit=0.2)


ARMS = {  # of the same family: what a position sees, and what it predicts
    "causal-next": ("decoder", "next"),
    "causal-masked": ("decoder", "masked"),
    "bidirectional-masked": ("encoder", "masked"),
}


def config_of(family: str, **more: object) -> TrainConfig:
    return TrainConfig(**{"arch": FAMILIES[family].archs[0], "family": family, **SIZES, **more})  # type: ignore[arg-type]


def arm_of(name: str, **more: object) -> TrainConfig:
    arch, objective = ARMS[name]
    return config_of("prenorm", arch=arch, objective=objective, **more)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_learns(family: str, embedded: Corpus) -> None:
    config = config_of(family, lr=5e-3)
    stream = WindowStream(embedded, 32, objective=config.task, batch_size=16)
    model = build_model(config, vocab_size=embedded.vocab_size).train()
    optimizer = make_optimizer(model, config)
    losses = []
    for step in range(25):
        loss = model(**stream.batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(embedded.vocab_size), abs=0.15), "ignorance at the start"
    assert all(map(math.isfinite, losses)) and sum(losses[-5:]) / 5 < 0.75 * losses[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_of_every_family_load_like_any_model(family: str, embedded: Corpus, tmp_path: Path) -> None:
    config = config_of(family)
    model = build_model(config, vocab_size=embedded.vocab_size)
    keep = Checkpoints(tmp_path, embedded.path / "tokenizer", (0,))
    path = keep.save(0, model, make_optimizer(model, config), state={})
    loaded = load_model(str(path), device="cpu")
    assert loaded.is_decoder == (config.arch == "decoder") and loaded.max_context == 32
    assert type(loaded.model) is type(model) and loaded.model.config._attn_implementation == "sdpa"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.model.parameters(), strict=True))
    text = embedded.tokenizer.decode(embedded.train.tokens[:20])
    assert loaded.tokenizer(text)["input_ids"] == embedded.train.tokens[:20].tolist(), "no tokens are added around it"


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_weights_depend_on_the_seed_alone(family: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = build_model(config_of(family), vocab_size=50)
    assert torch.equal(before, torch.get_rng_state()), "the global generator is left alone"
    torch.manual_seed(2)
    same, other = build_model(config_of(family), vocab_size=50), build_model(config_of(family, seed=1), vocab_size=50)
    pairs = list(zip(one.parameters(), same.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs) and not all(torch.equal(a, c) for a, _, c in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_there_is_no_dropout_unless_asked_for(family: str) -> None:
    ids = torch.arange(4, 36)[None]
    for dropout, same in ((0.0, True), (0.3, False)):
        model = build_model(config_of(family, dropout=dropout), vocab_size=50).train()
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits) == same


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_of_ones_and_no_mask_are_the_same(family: str) -> None:
    model = build_model(config_of(family), vocab_size=50).eval()
    ids = torch.arange(4, 36)[None]
    masked = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert torch.allclose(model(input_ids=ids).logits, masked, atol=1e-5)


def test_a_family_costs_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = TrainableFamily(
        "opt", ("decoder",), "opt", ("dropout", "attention_dropout"), inner_field="ffn_dim", rotary=False
    )
    monkeypatch.setitem(FAMILIES, "opt", row)
    model = build_model(config_of("opt"), vocab_size=50)
    ids = torch.arange(4, 36)[None]
    assert math.isfinite(model(input_ids=ids, labels=ids).loss.item())


def test_decoders_are_causal_and_encoders_are_not() -> None:
    ids = torch.arange(4, 36)[None]
    changed = ids.clone()
    changed[0, -1] = 40
    for family, row in FAMILIES.items():
        model = build_model(config_of(family), vocab_size=50).eval()
        first = (model(input_ids=ids).logits - model(input_ids=changed).logits)[0, 0].abs().max()
        assert (first < 1e-6) == (row.archs[0] == "decoder"), family


def test_arms_start_from_the_same_weights() -> None:
    first, *rest = (build_model(arm_of(arm), vocab_size=50).state_dict() for arm in ARMS)
    for weights in rest:
        assert list(first) == list(weights), "the same parameters"
        assert all(torch.equal(first[name], weights[name]) for name in first)
    other = build_model(arm_of("causal-masked", seed=1), vocab_size=50).state_dict()
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_sees_and_predicts_what_its_name_says(arm: str, embedded: Corpus, tmp_path: Path) -> None:
    config = arm_of(arm)
    model = build_model(config, vocab_size=embedded.vocab_size).eval()
    keep = Checkpoints(tmp_path, embedded.path / "tokenizer", (0,))
    stored = load_model(str(keep.save(0, model, make_optimizer(model, config), state={})), device="cpu")
    assert stored.is_decoder == (config.arch == "decoder") and stored.max_context == 32
    batch = WindowStream(embedded, 32, objective=config.task).batch(0)
    later = batch["input_ids"].clone()
    later[:, -1] = 9 - (later[:, -1] == 9).long()
    for each in (model, stored.model):
        with torch.no_grad():
            seen = (each(input_ids=batch["input_ids"]).logits - each(input_ids=later).logits)[:, 0].abs().max() > 1e-7
            found = each(**batch)
        assert seen == (config.arch == "encoder"), "only attention to both sides sees what comes later"
        targets = (
            batch["labels"]
            if config.task == "masked"
            else torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        )
        wanted = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), targets.flatten())
        assert found.loss.item() == pytest.approx(wanted.item(), rel=1e-5), "masked labels are not shifted"


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_learns(arm: str, embedded: Corpus) -> None:
    assert _after_learning(arm_of(arm, lr=5e-3), embedded, steps=25) < 0.75


def _after_learning(config: TrainConfig, corpus: Corpus, *, steps: int) -> float:
    """The loss after some updates over that before them."""
    stream = WindowStream(corpus, 32, objective=config.task, batch_size=16)
    model = build_model(config, vocab_size=corpus.vocab_size).train()
    optimizer = make_optimizer(model, config)
    losses = []
    for step in range(steps):
        loss = model(**stream.batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-5:]) / 5 / losses[0]


def test_objectives_without_a_model_are_refused() -> None:
    with pytest.raises(AnisoscopeError, match="the answer leaks"):
        TrainConfig(arch="encoder", family="prenorm", objective="next")
    with pytest.raises(AnisoscopeError, match=r"gpt2 has no causal model with a masked-token loss.* --family prenorm"):
        TrainConfig(objective="masked")
    with pytest.raises(AnisoscopeError, match="unknown objective 'causal'"):
        TrainConfig(objective="causal")
    assert TrainConfig(arch="encoder", objective="masked").arm == "encoder", "what is the rule needs no name"


def test_decay_is_for_matrices_only() -> None:
    model = build_model(config_of("bert"), vocab_size=50)
    decayed, free = (group["params"] for group in make_optimizer(model, config_of("bert")).param_groups)
    table = model.get_input_embeddings().weight  # type: ignore[operator]
    assert any(p is table for p in decayed) and all(p.ndim >= 2 for p in decayed) and all(p.ndim < 2 for p in free)
    assert len(decayed) + len(free) == len(list(model.parameters()))


def test_a_wrong_family_is_explained() -> None:
    with pytest.raises(
        AnisoscopeError, match=r"bert is a family of encoders.* take one of gpt2, gpt_neox, llama, prenorm"
    ):
        choose_family("decoder", "bert")
    with pytest.raises(AnisoscopeError, match="did you mean 'llama'"):
        choose_family("decoder", "lama")
    with pytest.raises(AnisoscopeError, match="unknown architecture 'seq2seq'"):
        choose_family("seq2seq")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"width": 30, "heads": 4}, "width 30 does not divide into 4 heads; take a multiple of 4, such as 28"),
        ({"width": 36, "heads": 4, "family": "llama"}, "even width of each .rotary positions.; take a multiple of 8"),
        ({"steps": 0}, "steps is 0; expected at least 1"),
        ({"lr": 0.0}, "learning rate is 0.0"),
        ({"lr": math.nan}, "lr is 'nan'"),
        ({"dropout": 1.0}, "dropout is 1.0; expected a share"),
        ({"mask_rate": 0.0}, "needs some masked tokens"),
        ({"limit": -1.0}, "limit is -1.0 megabytes"),
        ({"betas": (0.9, 1.0)}, "expected two numbers from 0"),
        ({"tokens": "words"}, "expected char, enwik8 .*or bpe:N"),
        ({"tokens": "bpe:100"}, "vocabulary of 100 is too small"),
        ({"frequency": "zipf:a"}, "expected natural, flat, or zipf:S"),
        ({"checkpoints": "often"}, "expected log, every:N, none or steps"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"device": "abacus"}, "unknown device 'abacus'"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_computed(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(AnisoscopeError, match=sentence):
        TrainConfig(**wrong)  # type: ignore[arg-type]


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    config = TrainConfig(steps=101, warmup=10, lr=1.0)
    rates = [config.learning_rate(step) for step in range(101)]
    assert rates[:10] == pytest.approx([k / 10 for k in range(1, 11)])
    assert rates[100] == pytest.approx(0.1) and rates[55] == pytest.approx(0.55) and rates[10] == pytest.approx(1.0)
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))
    assert TrainConfig(steps=1).learning_rate(0) > 0 and TrainConfig(steps=3, warmup=0, lr=1.0).learning_rate(0) == 1.0


def test_checkpoint_schedules_join() -> None:
    assert checkpoint_steps("log,every:6,7", 20) == (0, 1, 2, 4, 6, 7, 8, 12, 16, 18, 20)
    assert checkpoint_steps("none", 20) == (20,) and checkpoint_steps("99", 20) == (20,)
    with pytest.raises(AnisoscopeError, match="checkpoints ',' names none; expected log"):
        checkpoint_steps(",", 20)


def test_checkpoints_whose_monitor_is_still_being_saved_are_kept_until_they_are_complete(
    embedded: Corpus, tmp_path: Path
) -> None:
    class Late:
        """A monitor that saves its state later."""

        def __init__(self) -> None:
            self.asked: list[Path] = []

        def save(self, folder: Path, *, wait: bool = True) -> None:
            assert not wait and folder.is_dir()
            self.asked.append(folder)

    model = build_model(TrainConfig(layers=1, width=8, heads=1, context=8, device="cpu"), vocab_size=16)
    optimizer, monitor = torch.optim.AdamW(model.parameters()), Late()
    keep = Checkpoints(tmp_path, embedded.path / "tokenizer", (4,))
    for step in (0, 2, 4, 6):
        keep.save(step, model, optimizer, state={}, monitor=monitor)
        if step == 0:
            (monitor.asked[0] / "monitor.pt").touch()
    (monitor.asked[1] / ".monitor.pt.77").touch()  # of a process that was killed while it wrote
    assert list(keep.by_step()) == [0, 2, 4, 6] and keep.newest() == tmp_path / "checkpoint-0"
    (monitor.asked[2] / "monitor.pt").touch()
    assert keep.newest() == tmp_path / "checkpoint-4"
    keep.tidy(6)
    assert list(keep.by_step()) == [4, 6]
    (monitor.asked[3] / "monitor.pt").touch()
    keep.tidy(6)
    assert keep.newest() == tmp_path / "checkpoint-6" and list(keep.by_step()) == [4, 6], "4 is scheduled"
    assert not (tmp_path / "checkpoint-4" / "training").exists()

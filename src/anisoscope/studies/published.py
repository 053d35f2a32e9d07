"""The models of the paper by their hub ids: each a run of its own, one at a time."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.results.folder import RunFolder, slug
from anisoscope.results.modality import IMAGES_DATA, SOUNDS_DATA, TEXT_DATA, Medium
from anisoscope.tangent.plan import GEOMETRY

if TYPE_CHECKING:
    from anisoscope.studies.inherent.protocol import Inherent
    from anisoscope.studies.shape.protocol import ShapeStudy


@dataclass(frozen=True)
class PaperModel:
    """A model, or the series of its checkpoints; a large one may be spread over devices."""

    spec: str
    series: bool = False
    revisions: tuple[str, ...] = ()
    large: bool = False


_PYTHIA = (0, 1, 4, 16, 64, 256, 512, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 143000)
_TINYLLAMA = (  # thousands of steps, and of millions of tokens, as its authors name them
    (5, 10),
    (65, 136),
    (125, 262),
    (185, 388),
    (240, 503),
    (300, 629),
    (360, 755),
    (420, 881),
    (480, 1007),
    (540, 1132),
    (600, 1258),
    (660, 1384),
)
SHAPE_PAPER: tuple[PaperModel, ...] = (
    *(PaperModel(name) for name in ("bert-base-uncased", "roberta-base", "albert-base-v2")),
    *(PaperModel(name) for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")),
    *(PaperModel(f"facebook/opt-{size}") for size in ("125m", "350m", "1.3b", "2.7b")),
    *(PaperModel(f"facebook/opt-{size}", large=True) for size in ("6.7b", "13b")),
    PaperModel("meta-llama/Llama-2-7b-hf", large=True),
    PaperModel("EleutherAI/gpt-j-6b", large=True),
    PaperModel("tiiuae/falcon-7b", large=True),
    *(PaperModel(f"bigscience/bloom-{size}") for size in ("560m", "1b1", "3b")),
    PaperModel("bigscience/bloom-7b1", large=True),
    PaperModel("EleutherAI/pythia-2.8b", series=True, revisions=tuple(f"step{step}" for step in _PYTHIA)),
    PaperModel(
        "TinyLlama/tinyLlama-intermediate-checkpoints",
        series=True,
        revisions=tuple(f"step-{steps}k-token-{tokens}B" for steps, tokens in _TINYLLAMA),
    ),
)


def measure_papers_models(study: ShapeStudy) -> None:
    """Measure the paper's models, or those of them that were named."""
    measure_models(study, chosen(study.config.models, SHAPE_PAPER), _measure_shape)


def measure_models(study: Any, models: Sequence[Any], measure: Callable[[Any, Any, Path], None]) -> None:
    """Measure what can be had and say what cannot; one model is in memory at a time, and on disk if so asked.

    A model that is finished is not looked at again, whatever became of the others.
    """
    for number, model in enumerate(models):
        if study.progress is not None:
            study.progress("models", number, len(models))
        path = study.folder.path / "arms" / slug(model.spec)
        try:
            measure(study, model, path)
        except (AnisoscopeError, OSError, RuntimeError, ValueError) as error:  # gated, gone, too large, out of memory
            study.skip(model.spec, " ".join(str(error).split()) or type(error).__name__)
        finally:
            make_room()
            study.join(path)
    if not study.tables:
        raise AnisoscopeError(
            f"none of the {len(models)} models of the paper could be loaded (the first: "
            f"{study.about['skipped'][0]['reason'].rstrip('.')}); this preset needs their weights from the hub or its "
            "cache."
        )


def chosen(names: Sequence[str], models: Sequence[Any]) -> list[Any]:
    """The models of those names, or all."""
    known = {model.spec: model for model in models}
    for name in names:
        if name not in known:
            raise unknown_name("model of the paper", name, known)
    return [known[name] for name in names] if names else list(models)


def _measure_shape(study: ShapeStudy, model: PaperModel, path: Path) -> None:
    """One sweep: over the checkpoints of a series, or of one model."""
    from anisoscope.series.config import SweepConfig
    from anisoscope.series.sweep import Sweeper

    c = study.config
    config = SweepConfig(
        model.spec,
        model.revisions,
        series=model.series,
        preset="shape",
        halves=True,
        data=c.data,
        tokens=c.tokens,
        device=c.device,
        device_map="auto" if model.large and importlib.util.find_spec("accelerate") else None,
        remove_downloads=c.remove_downloads and bool(model.revisions),
    )
    folder = RunFolder.create(path, asdict(config), resume=True)
    with fetched(model, folder) if c.remove_downloads else contextlib.nullcontext():
        Sweeper(config, folder, command=study.command, progress=study.told(path.name)).run()


@contextlib.contextmanager
def fetched(model: PaperModel, folder: RunFolder) -> Iterator[None]:
    """The weights of a single model while they are needed; a sweep over revisions does that for each of them."""
    if model.series or Path(model.spec).exists() or folder.about().get("status") == "complete":
        yield
        return
    from anisoscope.models.downloads import Downloads

    downloads = Downloads(model.spec, ["main"], folder.path / "state" / "downloads.json", remove=True)
    downloads.ready("main")
    yield
    downloads.finished("main")


def make_room() -> None:
    """Give the memory of a model back before the next one is loaded."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# The models of the paper by their hub ids: each a run of its own, one at a time, of every modality.


@dataclass(frozen=True)
class Published(PaperModel):
    """A model, or the checkpoints of one training under ids of their own, and what it reads."""

    data: Medium = TEXT_DATA
    others: tuple[str, ...] = ()  # further checkpoints, in the order of training


_STEPS = (0, 20, 40, 80, 120, 160, 200, 400, 600, 800, 1200, 1600, 2000)  # thousands, of MultiBERTs' own
_MULTIBERTS = tuple(f"google/multiberts-seed_0-step_{step}k" for step in _STEPS)
INHERENT_PAPER: tuple[Published, ...] = (
    *(Published(name) for name in ("bert-base-uncased", "roberta-base", "albert-base-v2", "gpt2", "t5-base")),
    *(Published(name) for name in ("google/canine-c", "google/canine-s", "google/byt5-base")),
    *(
        Published(name, data=SOUNDS_DATA)
        for name in ("facebook/wav2vec2-base", "facebook/hubert-base-ls960", "openai/whisper-base")
    ),
    *(
        Published(name, data=IMAGES_DATA)
        for name in (
            "google/vit-base-patch16-224",
            "microsoft/beit-base-patch16-224",
            "facebook/deit-base-patch16-224",
            "nvidia/mit-b0",
            "microsoft/resnet-50",
            "google/efficientnet-b0",
            "microsoft/cvt-13",
            "facebook/convnext-tiny-224",
        )
    ),
    Published(_MULTIBERTS[0], series=True, others=_MULTIBERTS[1:]),  # queries and keys over training
)
_ELSEWHERE = "transformers has no such model; load it as a plain module and give it to anisoscope.measure"
ABSENT: dict[str, str] = {
    "CharacterBERT": f"{_ELSEWHERE} (code: helboukkouri/character-bert)",
    "MANTa-LM": f"{_ELSEWHERE} (its weights need code of their authors)",
    "VAN": "transformers 5 no longer has it; load it as a plain module and give it to anisoscope.measure",
}


def measure_published(study: Inherent) -> None:
    """Measure the paper's models, or those of them that were named; what is not in transformers is named as such."""
    if not study.config.models:
        study.about["absent"] = [{"model": name, "reason": reason} for name, reason in ABSENT.items()]
        study.about["warnings"] += [f"{name} is not measured: {reason}" for name, reason in ABSENT.items()]
    measure_models(study, chosen(study.config.models, INHERENT_PAPER), _measure_modality)


def _measure_modality(study: Inherent, model: Published, path: Path) -> None:
    if model.series:
        _sweep(study, model, path)
        return
    from anisoscope.measurement.config import ProfileConfig
    from anisoscope.measurement.profile import Profiler

    c = study.config
    data = getattr(c, model.data.name)
    metrics = GEOMETRY["attention"]
    config = ProfileConfig(models=(model.spec,), data=data, tokens=c.tokens, metrics=metrics, device=c.device)
    folder = RunFolder.create(path, asdict(config), resume=True)
    with fetched(model, folder) if c.remove_downloads else contextlib.nullcontext():
        Profiler(config, folder, command=study.command, progress=study.told(path.name)).run()


def _sweep(study: Inherent, model: Published, path: Path) -> None:
    from anisoscope.series.config import SweepConfig
    from anisoscope.series.sweep import Sweeper

    c = study.config
    name = model.spec.rpartition("/")[2].partition("-step")[0]
    config = SweepConfig(
        model.spec,
        others=model.others,
        preset="attention",
        name=name,
        data=c.text,
        tokens=c.tokens,
        device=c.device,
    )
    folder = RunFolder.create(path, asdict(config), resume=True)
    Sweeper(config, folder, command=study.command, progress=study.told(path.name)).run()

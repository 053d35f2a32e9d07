"""The published models of the papers by hub id, and how a study measures each in its own run, one at a time."""

from __future__ import annotations

import contextlib
import difflib
import gc
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.models.downloads import Downloads
from anisoscope.results.folder import RunFolder, slug
from anisoscope.results.modality import IMAGES_DATA, SOUNDS_DATA, TEXT_DATA, Medium
from anisoscope.series import SweepConfig
from anisoscope.series.sweep import Sweeper
from anisoscope.studies.study_run import ArmsStudy


@dataclass(frozen=True)
class PaperModel:
    """A model, or a series of its checkpoints in order: revisions of one id, or `others` with their own ids.

    Revisions are chosen among those that the hub has, about `most` of them; `revisions` are what is known of them, and
    are taken where the hub cannot be asked.
    """

    spec: str
    series: bool = False
    revisions: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    most: int = 8
    large: bool = False  # may be distributed over several devices
    data: Medium = TEXT_DATA

    @property
    def name(self) -> str:
        """The last part of the id."""
        return self.spec.rstrip("/").split("/")[-1]

    @property
    def wanted(self) -> tuple[str, ...]:
        """The revisions as `--revisions` takes them; none for a single model, for several ids and for a folder."""
        hub = self.series and not self.others and not Path(self.spec).exists()
        return (f"log:{self.most}", *self.revisions) if hub else ()


def _series(spec: str, revisions: Sequence[str], **fields: Any) -> PaperModel:
    return PaperModel(spec, series=True, revisions=tuple(revisions), **fields)


def _steps(form: str, *steps: int) -> tuple[str, ...]:
    """Names of revisions: each of the steps, put into a form."""
    return tuple(form.format(step) for step in steps)


def _models(form: str, names: str, **fields: Any) -> list[PaperModel]:
    """One model for each of the names, put into the form of an id."""
    return [PaperModel(form.format(name), **fields) for name in names.split()]


# names of revisions on the hub, as far as we know them; what is there is asked where the hub can be reached
_PYTHIA = (0, 1, 4, 16, 64, 256, 512, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 143000)
_OLMO = ("step1000-tokens4B", "step10000-tokens41B", "step100000-tokens419B", "step738020-tokens3094B")
_EUROBERT = _steps("step{}", 10_000, 20_000, 40_000, 80_000, 160_000, 320_000, 480_000)
_SMOLLM = "HuggingFaceTB/SmolLM2-{}-intermediate-checkpoints"
_SMOLLM_360M = _steps("step-{}", 160_000, 320_000, 640_000, 1_280_000, 2_560_000)
_SMOLLM_2B = _steps("step-{}", 125_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_125_000)
_TINYLLAMA_BATCH = 2048 * 1024 / 1e6  # thousands of steps -> billions of tokens
_TINYLLAMA = [
    f"step-{k}k-token-{round(k * _TINYLLAMA_BATCH)}B" for k in (5, 65, 125, 185, 240, 300, 360, 420, 480, 540, 600, 660)
]
_TINYLLAMA_LATER = tuple(  # the later checkpoints that also have an id of their own
    f"TinyLlama/TinyLlama-1.1B-intermediate-step-{name}"
    for name in ("715k-1.5T", "955k-token-2T", "1195k-token-2.5T", "1431k-3T")
)
_BLOOM = {
    size: _steps("global_step{}", *(1000 * step for step in steps))
    for size, steps in {
        "560m": (1, 10, 100, 200, 300, 400, 500, 600),
        "1b1": (1, 10, 100, 200, 300, 400, 500, 600),
        "1b7": (1, 10, 50, 100, 150, 200, 250, 300),
    }.items()
}
_MULTIBERTS = tuple(  # thousands of steps
    f"google/multiberts-seed_0-step_{step}k" for step in (0, 20, 40, 80, 120, 160, 200, 400, 600, 800, 1200, 1600, 2000)
)
REVISITING_MODELS: tuple[PaperModel, ...] = (
    *(_series(f"EuroBERT/EuroBERT-{size}", _EUROBERT) for size in ("210m", "610m")),
    PaperModel("almanach/moderncamembert-base"),
    _series("allenai/OLMo-1B-hf", _OLMO),
    *(
        _series(f"EleutherAI/pythia-{size}", _steps("step{}", 0, 1, 8, 64, 512, 4000, 32000, 143000))
        for size in ("160m", "410m", "1b")
    ),
    PaperModel("almanach/Gaperon-1125-1B"),
    _series(_SMOLLM.format("360M"), _SMOLLM_360M),
    _series(_SMOLLM.format("1.7B"), _SMOLLM_2B),
)
SHAPE_MODELS: tuple[PaperModel, ...] = (
    *_models("{}", "bert-base-uncased roberta-base albert-base-v2 gpt2 gpt2-medium gpt2-large gpt2-xl"),
    *_models("facebook/opt-{}", "125m 350m 1.3b 2.7b"),
    *_models("facebook/opt-{}", "6.7b 13b", large=True),
    *_models("meta-llama/Llama-2-{}-hf", "7b 13b", large=True),
    *_models("{}", "EleutherAI/gpt-j-6b tiiuae/falcon-7b", large=True),
    *_models("bigscience/bloom-{}", "560m 1b1 1b7 3b"),
    PaperModel("bigscience/bloom-7b1", large=True),
    _series("EleutherAI/pythia-2.8b", _steps("step{}", *_PYTHIA), most=16),
    *(_series(f"bigscience/bloom-{size}-intermediate", names) for size, names in _BLOOM.items()),
    _series("TinyLlama/tinyLlama-intermediate-checkpoints", _TINYLLAMA, most=12),
    # no list of its revisions is known; without the hub the four that have ids of their own stand for it
    _series("TinyLlama/tinyLlama-intermediate-checkpoints-after-1T-token", ()),
    PaperModel(_TINYLLAMA_LATER[0], series=True, others=_TINYLLAMA_LATER[1:]),
)
INHERENT_MODELS: tuple[PaperModel, ...] = (
    *_models("{}", "bert-base-uncased roberta-base albert-base-v2 gpt2 t5-base"),
    *_models("google/{}", "canine-c canine-s byt5-base"),  # characters
    *_models("facebook/{}", "wav2vec2-base hubert-base-ls960", data=SOUNDS_DATA),
    PaperModel("openai/whisper-base", data=SOUNDS_DATA),
    *_models("{}", "google/vit-base-patch16-224 microsoft/beit-base-patch16-224", data=IMAGES_DATA),
    *_models("{}", "facebook/deit-base-patch16-224 nvidia/mit-b0 microsoft/resnet-50", data=IMAGES_DATA),
    *_models("{}", "google/efficientnet-b0 microsoft/cvt-13 facebook/convnext-tiny-224", data=IMAGES_DATA),
    PaperModel(_MULTIBERTS[0], series=True, others=_MULTIBERTS[1:]),  # for queries and keys over training
)
_ELSEWHERE = "transformers has no such model; load it as a plain module and give it to anisoscope.measure"
ABSENT: dict[str, str] = {
    "CharacterBERT": f"{_ELSEWHERE} (code: helboukkouri/character-bert)",
    "MANTa-LM": f"{_ELSEWHERE} (its weights need code of their authors)",
    "VAN": "transformers 5 no longer has it; load it as a plain module and give it to anisoscope.measure",
}


def chosen_models(names: Sequence[str], models: Sequence[PaperModel]) -> list[PaperModel]:
    """The models with these hub ids, or names (the last parts of ids), each once; all if none are given.

    >>> [model.spec for model in chosen_models(["pythia-1b", "EleutherAI/pythia-1b"], REVISITING_MODELS)]
    ['EleutherAI/pythia-1b']
    """
    known = {form: model for model in models for form in (model.name, model.spec)}
    for name in names:
        if name not in known:
            listed = [model.name for model in models]
            near = difflib.get_close_matches(name.split("/")[-1], listed, n=3, cutoff=0.4)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
            raise AnisoscopeError(f"unknown model of the paper {name!r}{hint} Known: {', '.join(listed)}.")
    return list(dict.fromkeys(known[name] for name in names)) if names else list(models)


def measure_models(
    study: ArmsStudy, models: Sequence[PaperModel], measure: Callable[[PaperModel, Path], None], *, named: bool = False
) -> None:
    """Measure all models that can be loaded and record the others as skipped; only one is in memory at a time.

    Finished models are not measured again. With `named` a model is named after the last part of its id.
    """
    for number, model in enumerate(models):
        study.tell("models", number, len(models))
        path = study.folder.path / "arms" / slug(model.spec)
        try:
            measure(model, path)
        except (AnisoscopeError, OSError, RuntimeError, ValueError) as error:  # gated, gone, too large, out of memory
            study.skip(model.spec, " ".join(str(error).split()) or type(error).__name__)
        finally:
            gc.collect()  # free the memory of this model before the next one is loaded
            torch.cuda.empty_cache()  # no effect without CUDA
            study.join(path, **({"name": model.name, "seed": 0} if named else {}))
    if not study.joined:
        raise AnisoscopeError(
            f"none of the {len(models)} models of the paper could be loaded (the first: "
            f"{study.about['skipped'][0]['reason'].rstrip('.')}); this preset needs their weights from the hub or its "
            "cache."
        )


def sweep_model(
    study: ArmsStudy, model: PaperModel, path: Path, *, remove_downloads: bool = False, **options: Any
) -> None:
    """Sweep over the checkpoints of a series, or over one model; `options` (data, tokens, …) as in SweepConfig."""
    config = SweepConfig(
        model.spec,
        model.wanted,
        series=model.series,
        others=model.others,
        device=study.config.device,
        device_map="auto" if model.large and importlib.util.find_spec("accelerate") else None,
        remove_downloads=remove_downloads and bool(model.wanted),
        **options,
    )
    folder = RunFolder.create(path, asdict(config), resume=True)
    with downloaded(model, folder) if remove_downloads else contextlib.nullcontext():
        Sweeper(config, folder, command=study.command, progress=study.progress_of(path.name)).run()


@contextlib.contextmanager
def downloaded(model: PaperModel, folder: RunFolder) -> Iterator[None]:
    """A context in which the weights of a single model are on disk; a sweep over revisions does this for each."""
    if model.series or Path(model.spec).exists() or folder.about().get("status") == "complete":
        yield
        return
    downloads = Downloads(model.spec, ["main"], folder.path / "state" / "downloads.json", remove=True)
    downloads.ready("main")
    yield
    downloads.finished("main")

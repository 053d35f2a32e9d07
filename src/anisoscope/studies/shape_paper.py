"""The models of the paper by their hub ids: each a run of its own, one at a time."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.runs.store import RunFolder, slug

if TYPE_CHECKING:
    from anisoscope.studies.shape import Shape


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
PAPER: tuple[PaperModel, ...] = (
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


def measure_papers_models(study: Shape) -> None:
    """Measure the paper's models, or those of them that were named."""
    measure_models(study, chosen(study.config.models, PAPER), _measure)


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


def _measure(study: Shape, model: PaperModel, path: Path) -> None:
    """One sweep: over the checkpoints of a series, or of one model."""
    from anisoscope.runs.sweep import Sweeper
    from anisoscope.runs.sweep_config import SweepConfig

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
    from anisoscope.capture.downloads import Downloads

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

"""The models of the paper by their hub ids: each a run of its own, one at a time, of every modality."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anisoscope.runs.plan import GEOMETRY
from anisoscope.runs.store import RunFolder
from anisoscope.studies.shape_paper import PaperModel, chosen, fetched, measure_models

if TYPE_CHECKING:
    from anisoscope.studies.inherent import Inherent


@dataclass(frozen=True)
class Published(PaperModel):
    """A model, or the checkpoints of one training under ids of their own, and what it reads."""

    data: str = "text"  # or images, audio
    others: tuple[str, ...] = ()  # further checkpoints, in the order of training


_STEPS = (0, 20, 40, 80, 120, 160, 200, 400, 600, 800, 1200, 1600, 2000)  # thousands, of MultiBERTs' own
_MULTIBERTS = tuple(f"google/multiberts-seed_0-step_{step}k" for step in _STEPS)
PAPER: tuple[Published, ...] = (
    *(Published(name) for name in ("bert-base-uncased", "roberta-base", "albert-base-v2", "gpt2", "t5-base")),
    *(Published(name) for name in ("google/canine-c", "google/canine-s", "google/byt5-base")),
    *(
        Published(name, data="audio")
        for name in ("facebook/wav2vec2-base", "facebook/hubert-base-ls960", "openai/whisper-base")
    ),
    *(
        Published(name, data="images")
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
    measure_models(study, chosen(study.config.models, PAPER), _measure)


def _measure(study: Inherent, model: Published, path: Path) -> None:
    if model.series:
        _sweep(study, model, path)
        return
    from anisoscope.runs.profile import ProfileConfig, Profiler

    c = study.config
    data = getattr(c, model.data)
    metrics = GEOMETRY["attention"]
    config = ProfileConfig(models=(model.spec,), data=data, tokens=c.tokens, metrics=metrics, device=c.device)
    folder = RunFolder.create(path, asdict(config), resume=True)
    with fetched(model, folder) if c.remove_downloads else contextlib.nullcontext():
        Profiler(config, folder, command=study.command, progress=study.told(path.name)).run()


def _sweep(study: Inherent, model: Published, path: Path) -> None:
    from anisoscope.runs.sweep import Sweeper
    from anisoscope.runs.sweep_config import SweepConfig

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

"""Models on paper: shapes, configurations without weights, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import prepare
from anisoscope.metrics.catalogue import parse_requests
from anisoscope.models.source import parse_model
from anisoscope.planning.subject import subject_of

LARGE = "shape:layers=80,width=8192,heads=64,kv_heads=8,ffn=28672,vocab=128256"


def test_a_large_shape_has_the_parameters_of_the_published_model() -> None:
    subject = subject_of(LARGE)
    assert subject.parameters == 70_553_706_496  # Llama 3 70B
    per_token = subject.passed(1, 128).flops / 128
    assert per_token == pytest.approx(2 * (subject.parameters - 2 * 128256 * 8192), rel=0.02)  # tables are no products


def test_sites_and_rows_of_a_shape_are_those_of_such_a_model() -> None:
    subject = subject_of("shape:layers=2,width=64,heads=4,kv_heads=2")
    setup = prepare(subject.model, parse_requests(None))
    shapes = {(site.layer, site.kind): shape for site, shape in subject.shapes(setup, 32).items()}
    assert (shapes[1, "resid"].width, shapes[1, "resid"].heads) == (64, 1)
    assert (shapes[1, "query"].width, shapes[1, "query"].heads) == (16, 4)
    assert (shapes[1, "key"].width, shapes[1, "key"].heads) == (16, 2)


def test_a_folder_with_a_configuration_alone_is_enough(tmp_path: Path) -> None:
    from anisoscope.models.checkpoint import fresh_config

    fresh_config("bert", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}).save_pretrained(
        tmp_path
    )
    subject = subject_of(str(tmp_path))
    assert subject.width == 32 and subject.files == 0 and next(subject.model.parameters()).is_meta


def test_a_model_of_pictures_tells_the_shape_of_its_rows() -> None:
    subject = subject_of("resnet:embedding_size=8,hidden_sizes=[8,16],depths=[1,1]", random_init=True)
    setup = prepare(subject.model, parse_requests(None))
    widths = {site.layer: shape.width for site, shape in subject.shapes(setup, 1).items() if site.kind == "stage"}
    assert sorted(widths.values()) == [8, 16]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("shape:layers=2,width=64", "does not say its heads"),
        ("shape:layers=2,width=65,heads=4", "is no shape"),
        ("shape:layers=two,width=64,heads=4", "expected a whole number"),
        ("shape:layer=2,width=64,heads=4", "unknown size of a shape 'layer'"),
    ],
)
def test_shapes_that_are_none_are_refused(spec: str, words: str) -> None:
    with pytest.raises(AnisoscopeError, match=words):
        subject_of(spec)


def test_a_shape_is_no_model_that_can_be_measured() -> None:
    with pytest.raises(AnisoscopeError, match="add --dry-run"):
        parse_model(LARGE)

"""Pictures of any size and mode become RGB; what cannot be read is named, and processors never pad."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from anisoscope.data.images import EMBEDDED, Picture, as_rgb, read_images
from anisoscope.data.media_files import MediaCounts, class_names, medium_of
from anisoscope.data.synthetic import CLASSES, SHAPES, make_picture
from anisoscope.errors import AnisoscopeError
from anisoscope.models.processor import PlainImages, picture_inputs, plain_images, processor_fingerprint
from anisoscope.results.modality import IMAGES_DATA

Image: Any = pytest.importorskip("PIL.Image")


def pictures(source: object, **options: Any) -> list[Picture]:
    return list(read_images(source, **options))  # type: ignore[arg-type]


def save(path: Path, array: np.ndarray, mode: str | None = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(array)
    (image.convert(mode) if mode else image).save(path, **options)
    return path


def test_pictures_that_are_made_are_the_same_each_time_and_tell_their_class() -> None:
    one, label = make_picture(12, size=32)
    again, _ = make_picture(12, size=32)
    other, _ = make_picture(12, size=32, seed=1)
    assert (one == again).all() and not (one == other).all()
    assert SHAPES[label] == SHAPES[12 % CLASSES] and CLASSES >= 10
    assert one.dtype == np.uint8 and one.shape == (32, 32, 3)
    assert make_picture(3, size=1)[0].shape == (1, 1, 3)


def test_the_embedded_pictures_are_grouped_by_shape() -> None:
    counts = MediaCounts()
    found = pictures(None, group_by="folder", counts=counts)
    assert len(found) == counts.files == EMBEDDED[0]
    assert {p.group for p in found} == set(SHAPES)
    with pytest.raises(AnisoscopeError, match="group by `folder`"):
        pictures(None, group_by="colour")


def test_every_mode_becomes_rgb(tmp_path: Path) -> None:
    colour = make_picture(0, size=20)[0]
    grey = colour[:, :, 0]
    save(tmp_path / "a-rgb.png", colour)
    save(tmp_path / "b-grey.png", grey)
    save(tmp_path / "c-palette.png", colour, "P")
    save(tmp_path / "d-rgba.png", colour, "RGBA")
    save(tmp_path / "e-cmyk.jpg", colour, "CMYK", quality=95)
    save(tmp_path / "f-bits.png", grey, "1")
    save(tmp_path / "g-sixteen.png", grey.astype(np.uint16) * 257)
    save(tmp_path / "h.webp", colour, lossless=True)
    save(tmp_path / "i.bmp", colour)
    found = {Path(p.source).name: p.array for p in pictures(tmp_path)}
    assert all(a.shape == (20, 20, 3) and a.dtype == np.uint8 for a in found.values()) and len(found) == 9
    for name in ("a-rgb.png", "d-rgba.png", "h.webp", "i.bmp"):
        assert (found[name] == colour).all(), name
    for name in ("b-grey.png", "g-sixteen.png"):
        assert (found[name] == grey[:, :, None]).all(), name
    assert np.abs(found["e-cmyk.jpg"].astype(int) - colour).mean() < 30
    assert set(np.unique(found["f-bits.png"])) <= {0, 255}


def test_what_is_transparent_lies_on_white(tmp_path: Path) -> None:
    array = np.zeros((4, 4, 4), np.uint8)
    array[:2, :, 3] = 255
    save(tmp_path / "a.png", array)
    (found,) = pictures(tmp_path)
    assert (found.array[:2] == 0).all() and (found.array[2:] == 255).all()


def test_of_an_animation_the_first_frame_is_taken(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (6, 5), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    (found,) = pictures(tmp_path)
    assert found.array.shape == (5, 6, 3) and (found.array[:, :, 0] > 200).all() and (found.array[:, :, 2] < 50).all()


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([[True, False]]), [255, 0]),
        (np.array([[0.0, 1.0]]), [0, 255]),
        (np.array([[0.0, 4.0]], np.float32), [0, 255]),
        (np.array([[0, 200]], np.int64), [0, 200]),
        (np.array([[0, 65535]], np.int32), [0, 255]),
        (np.array([[0, 255]], np.uint16), [0, 0]),
    ],
)
def test_arrays_of_other_types_are_scaled(array: np.ndarray, expected: list[int]) -> None:
    assert as_rgb(array)[0, :, 1].tolist() == expected


def test_arrays_that_are_no_pictures_are_refused() -> None:
    with pytest.raises(ValueError, match="no image"):
        as_rgb(np.zeros((2, 3, 4, 5)))
    with pytest.raises(ValueError, match="not all finite"):
        as_rgb(np.array([[np.nan]]))


def test_folders_and_archives_give_the_same_pictures(tmp_path: Path) -> None:
    for number, name in enumerate(("cats/ä.png", "cats/二.png", "dogs/c.PNG")):
        save(tmp_path / "folder" / name, make_picture(number, size=9 + number)[0], format="PNG")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for path in sorted((tmp_path / "folder").rglob("*.[pP][nN][gG]")):
            archive.write(path, path.relative_to(tmp_path / "folder").as_posix())
    one, two = pictures(tmp_path / "folder", group_by="folder"), pictures(tmp_path / "all.zip", group_by="folder")
    assert [p.group for p in one] == [p.group for p in two] == ["cats", "cats", "dogs"]
    assert [p.array.shape[0] for p in one] == [9, 10, 11]
    assert all((a.array == b.array).all() for a, b in zip(one, two, strict=True))


def test_broken_files_are_named_and_skipped_unless_all_are(tmp_path: Path) -> None:
    whole = save(tmp_path / "whole.jpg", make_picture(0, size=64)[0]).read_bytes()
    (tmp_path / "whole.jpg").unlink()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "nothing.png").write_bytes(b"")
    with pytest.raises(
        AnisoscopeError, match=r"holds no images \(3 files, none of them readable; the first, .*cut.jpg"
    ):
        pictures(tmp_path)
    save(tmp_path / "good.png", make_picture(0, size=8)[0])
    counts = MediaCounts()
    assert len(pictures(tmp_path, counts=counts)) == 1
    assert not any("<" in words for words in counts.skipped), "the file is named once, and no object of a reader's"
    assert counts.unread.startswith("3 files could not be read and were skipped: ")
    assert counts.files == 1 and sorted(Path(s.split(": ")[0]).name for s in counts.skipped) == [
        "cut.jpg", "nothing.png", "text.png",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("empty", "holds no files; expected"),
        ("notes.txt", "is no file of images"),
        ("sounds", "with suffix .wav, none that is images"),
    ],
)
def test_what_is_no_picture_is_refused_in_a_sentence(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "sounds").mkdir()
    (tmp_path / "sounds" / "a.wav").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(AnisoscopeError, match=words):
        pictures(tmp_path / name)


def test_a_column_is_read_from_a_table_and_from_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    raw = io.BytesIO()
    Image.fromarray(make_picture(0, size=12)[0]).save(raw, "PNG")
    values = [{"bytes": raw.getvalue(), "path": None}] * 2
    pq.write_table(pa.table({"image": values, "label": [3, 4]}), tmp_path / "t.parquet")
    found = pictures(tmp_path / "t.parquet", group_by="label")
    assert [p.group for p in found] == ["3", "4"] and (found[0].array == make_picture(0, size=12)[0]).all()
    made = datasets.Dataset.from_dict(
        {"img": values, "n": [1, 2]}, features=datasets.Features({"img": datasets.Image(), "n": datasets.Value("int8")})
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
    assert [(p.array == found[0].array).all() for p in pictures("some/name")] == [True, True]
    with pytest.raises(AnisoscopeError, match="Name one of them with --group-by"):
        pictures("some/name", group_by="label")


# -- processors -------------------------------------------------------------------------------------------------------


class Reader(torch.nn.Module):
    """Stands for a model that reads pictures."""

    main_input_name = "pixel_values"

    def forward(self, pixel_values: torch.Tensor, pixel_mask: torch.Tensor | None = None) -> torch.Tensor:
        return pixel_values


def test_a_plain_processor_gives_every_picture_the_models_size() -> None:
    plain = PlainImages(16, 24)
    for size in ((1, 1), (100, 3), (16, 24)):
        x = picture_inputs(plain, np.full((*size, 3), 255, np.uint8), Reader())["pixel_values"]
        assert x.shape == (1, 3, 16, 24) and torch.allclose(x, torch.ones(()))
    same = make_picture(0, size=16)[0]
    expected = torch.from_numpy(same).permute(2, 0, 1)[None] / 255.0 * 2 - 1
    assert torch.allclose(PlainImages(16, 16)(same)["pixel_values"], expected, atol=1e-6)
    assert PlainImages(4, 4, channels=1)(same)["pixel_values"].shape == (1, 1, 4, 4)


def test_sizes_of_a_plain_processor_come_from_the_configuration() -> None:
    from transformers import ResNetConfig, SwinConfig, ViTConfig

    assert plain_images(ViTConfig(image_size=48, patch_size=16)) == PlainImages(48, 48)
    assert plain_images(ResNetConfig()) == PlainImages(224, 224)
    assert plain_images(SwinConfig(image_size=(32, 64), patch_size=4)) == PlainImages(32, 64)


def test_a_models_own_processor_is_used_as_it_is_and_does_not_pad() -> None:
    from transformers import DetrImageProcessorPil, ViTImageProcessorPil

    array = make_picture(1, size=40)[0]
    own = ViTImageProcessorPil(size={"height": 24, "width": 24}, image_mean=[0.1] * 3, image_std=[0.7] * 3)
    expected = own(images=[Image.fromarray(array)], return_tensors="pt")["pixel_values"]
    assert torch.allclose(picture_inputs(own, array, Reader())["pixel_values"], expected)
    assert picture_inputs(own, array[:1, :1], Reader())["pixel_values"].shape == (1, 3, 24, 24)
    pads = DetrImageProcessorPil(size={"shortest_edge": 20, "longest_edge": 60}, pad_size={"height": 80, "width": 80})
    wide = np.concatenate([array, array], axis=1)
    assert pads(images=[wide], return_tensors="pt")["pixel_values"].shape[-2:] == (80, 80), "it would pad"
    assert picture_inputs(pads, wide, Reader())["pixel_values"].shape[-2:] == (20, 40)


def test_processors_with_other_settings_have_other_fingerprints() -> None:
    from transformers import ViTImageProcessorPil

    small, large = (ViTImageProcessorPil(size={"height": n, "width": n}) for n in (8, 16))
    assert processor_fingerprint(small) == processor_fingerprint(ViTImageProcessorPil(**small.to_dict()))
    assert processor_fingerprint(small) != processor_fingerprint(large)


# -- arrays


def test_pictures_of_an_npz_have_their_labels_as_classes(tmp_path: Path) -> None:
    images, path = np.random.default_rng(0).integers(0, 256, (5, 6, 7)).astype(np.uint8), tmp_path / "digits.npz"
    np.savez(path, images=images, labels=np.array([10, 2, 2, 10, 9]))
    found = list(read_images(path, group_by="class"))
    assert [picture.group for picture in found] == ["10", "2", "2", "10", "9"]
    assert all(np.array_equal(p.array, np.repeat(x[..., None], 3, 2)) for p, x in zip(found, images, strict=True))
    assert class_names(str(path), IMAGES_DATA) == ["2", "9", "10"]
    assert medium_of(str(path)) is IMAGES_DATA
    assert [picture.group for picture in read_images(path)] == [""] * 5


def test_pictures_of_idx_files_are_read_from_a_folder_or_a_file(tmp_path: Path) -> None:
    images, labels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4), np.array([7, 1], np.uint8)
    for name, array in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", labels)):
        shape = b"".join(size.to_bytes(4, "big") for size in array.shape)
        (tmp_path / name).write_bytes(bytes([0, 0, 8, array.ndim]) + shape + array.tobytes())
    for source in (tmp_path, tmp_path / "train-images-idx3-ubyte"):
        found = list(read_images(source, group_by="class"))
        assert [picture.group for picture in found] == ["7", "1"]
        assert np.array_equal(found[1].array[..., 0], images[1])
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(AnisoscopeError, match="has no labels beside it; expected 'train-labels-idx1-ubyte'"):
        next(read_images(tmp_path))


def test_an_npz_without_pictures_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", x=np.zeros(3), y=np.zeros(3))
    with pytest.raises(AnisoscopeError, match="has x, y; expected arrays called images and labels"):
        next(read_images(tmp_path / "other.npz"))
    (tmp_path / "broken.npz").write_bytes(b"no archive")
    with pytest.raises(AnisoscopeError, match=r"is no readable \.npz"):
        next(read_images(tmp_path / "broken.npz"))

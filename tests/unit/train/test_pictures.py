"""Pictures: where they lie, what they become, and which do not open."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageColumn
from PIL import Image

from halfstep.errors import DataError, ModelError
from halfstep.train.pictures import Pictures, image_processor, mode_of, picture_folder, picture_rows
from hugging_face import pictures, vit

PLAIN = SimpleNamespace(image_size=None, num_channels=3)


def saved(folder: Path, columns: dict[str, list[object]], features: Features | None = None) -> Path:
    Dataset.from_dict(columns, features=features).save_to_disk(folder)
    return folder


def test_a_folder_a_class_is_a_shelf(tmp_path: Path) -> None:
    shelf = picture_folder(pictures(tmp_path / "images", number=2))
    assert [Path(name).relative_to(tmp_path).as_posix() for name in shelf.names] == [
        "images/circle/0.png",
        "images/circle/1.png",
        "images/square/0.png",
        "images/square/1.png",
    ]
    assert shelf.labels == ["circle", "circle", "square", "square"]


def test_a_saved_dataset_is_a_shelf_with_the_names_of_its_classes(tmp_path: Path) -> None:
    images = [str(tmp_path / "images" / kind / "0.png") for kind in ("circle", "square")]
    pictures(tmp_path / "images", number=1)
    features = Features({"picture": ImageColumn(), "kind": ClassLabel(names=["round", "angular"])})
    shelf = picture_rows(saved(tmp_path / "saved", {"picture": images, "kind": [0, 1]}, features), ("picture", "kind"))
    assert shelf.labels == ["round", "angular"]
    with Image.open(images[1]) as direct:
        assert np.array_equal(np.array(shelf.opened(1, "RGB")), np.array(direct))


def test_a_batch_is_what_the_arithmetic_says(tmp_path: Path) -> None:
    """A picture of one colour stays it at any size: value / 255, less 0.5, over 0.5."""
    (tmp_path / "a").mkdir()
    Image.new("RGB", (30, 11), (255, 0, 102)).save(tmp_path / "a" / "1.png")
    processor, size = image_processor(None, PLAIN, 8)
    assert (size.value, size.reason) == (8, "asked for")
    batch = Pictures(picture_folder(tmp_path), np.array([7]), np.array([0]), processor, "RGB").__getitems__([0, 0])
    expected = torch.tensor([1.0, -1.0, -0.2])[None, :, None, None].expand(2, 3, 8, 8)
    torch.testing.assert_close(batch["pixel_values"], expected, atol=1e-6, rtol=0)
    assert batch["labels"].tolist() == [7, 7]


def test_pictures_of_any_mode_become_what_the_model_takes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("L", (4, 4), 51).save(tmp_path / "a" / "1.png")
    shelf = picture_folder(tmp_path)
    for channels, mode in ((3, "RGB"), (1, "L")):
        config = SimpleNamespace(image_size=4, num_channels=channels)
        assert mode_of(config) == mode
        pixels = Pictures(shelf, np.array([0]), np.array([0]), image_processor(None, config, None)[0], mode)[0]["pixel_values"]
        torch.testing.assert_close(pixels, torch.full((1, channels, 4, 4), -0.6), atol=1e-6, rtol=0)
    with pytest.raises(ModelError) as error:
        mode_of(SimpleNamespace(num_channels=5))
    assert str(error.value) == "The model takes pictures of 5 channels, and files hold 1, 3 or 4."


def test_the_size_is_that_of_the_folder_the_architecture_or_what_is_asked(tmp_path: Path) -> None:
    vit(tmp_path / "vit")
    sizes = [
        image_processor(str(tmp_path / "vit"), PLAIN, None)[1],
        image_processor(None, SimpleNamespace(image_size=96), None)[1],
        image_processor(None, PLAIN, None)[1],
    ]
    assert [(size.value, size.reason) for size in sizes] == [
        (16, "that of the model folder's image processor"),
        (96, "that of the architecture"),
        (224, "usual; the architecture takes any"),
    ]
    processor, asked = image_processor(str(tmp_path / "vit"), PLAIN, 24)
    assert asked.value == 24
    assert processor(images=[Image.new("RGB", (9, 9))], return_tensors="np")["pixel_values"].shape == (1, 3, 24, 24)


def test_an_image_processor_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "NoSuchProcessor"}')
    with pytest.raises(ModelError, match=r"`model.path`: the preprocessor_config.json of .* cannot be used: "):
        image_processor(str(tmp_path), PLAIN, None)


def test_a_file_that_is_no_picture_is_named_before_training(tmp_path: Path) -> None:
    broken = pictures(tmp_path / "images", number=1) / "circle" / "notes.png"
    broken.write_text("not a picture")
    with pytest.raises(DataError) as error:
        picture_folder(tmp_path / "images")
    assert str(error.value) == f"{broken} is not a picture that opens: cannot identify image file {str(broken)!r}"


def test_a_picture_that_breaks_off_is_named_when_it_is_wanted(tmp_path: Path) -> None:
    whole = pictures(tmp_path / "images", number=1, side=200) / "circle" / "0.png"
    whole.write_bytes(whole.read_bytes()[:500])
    shelf = picture_folder(tmp_path / "images")
    with pytest.raises(DataError) as error:
        shelf.opened(0, "RGB")
    assert str(error.value).startswith(f"{whole} is not a picture that opens: ")


def test_folders_that_hold_no_classes_or_no_pictures_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        picture_folder(tmp_path / "nowhere")
    assert str(error.value) == (f"{tmp_path}/nowhere is not a folder. Name one that holds a folder of pictures for each class.")
    with pytest.raises(DataError) as error:
        picture_folder(tmp_path)
    assert str(error.value) == (f"{tmp_path} holds no folders. Pictures lie in a folder for each class, as {tmp_path}/cat/1.png.")
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError) as error:
        picture_folder(tmp_path)
    assert str(error.value) == f"{tmp_path}/cat holds no picture."


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", {"a": [1], "b": [2]})
    with pytest.raises(DataError) as error:
        picture_rows(folder, ("image", "label"))
    assert str(error.value) == f"{folder} has no column `image`. Its columns are `a`, `b`."


def test_a_column_without_pictures_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", {"image": ["cat.png"], "label": ["cat"]})
    with pytest.raises(DataError, match=r"saved, row 1 is not a picture that opens: "):
        picture_rows(folder, ("image", "label")).opened(0, "RGB")


def test_pillow_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.train.pictures.find_spec", lambda name: None)
    with pytest.raises(DataError) as error:
        picture_folder(tmp_path)
    assert str(error.value) == "Pictures need Pillow, which is not installed: pip install 'halfstep[train]'."

"""Pictures with their classes, from a folder of folders or a column of `datasets`, opened when they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from halfstep.config.choice import ASKED_FOR, Choice
from halfstep.errors import DataError, ModelError
from halfstep.train.classes import label_of
from halfstep.train.documents import Ints
from halfstep.train.models import root_cause
from halfstep.train.tables import class_name, saved_dataset
from halfstep.train.windows import Batch

PROCESSOR_FILE = "preprocessor_config.json"
USUAL_SIZE = 224
"""Pixels along a side where neither the folder nor the architecture says: what most were trained on ImageNet with."""
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""What Pillow calls pictures of so many channels."""


class Shelf:
    """Pictures that are not opened yet, with the names of their classes.

    Args:
        open_one: from a number to a picture of Pillow's.
        names: what each is called in messages.
        labels: the name of each one's class.
    """

    def __init__(self, open_one: Callable[[int], Any], names: Sequence[str], labels: Sequence[str]) -> None:
        self._open_one, self.names, self.labels = open_one, names, labels

    def __len__(self) -> int:
        """The number of pictures."""
        return len(self.names)

    def opened(self, index: int, mode: str) -> Any:
        """A picture with all of its pixels.

        Raises:
            DataError: it does not open; it is named.
        """
        try:
            with self._open_one(index) as picture:
                return picture.convert(mode)
        except Exception as error:  # Pillow raises whatever the reader of a format does
            cause = str(error).partition("\n")[0]
            raise DataError(f"{self.names[index]} is not a picture that opens: {cause}") from None


def picture_folder(folder: Path) -> Shelf:
    """The pictures of a folder that holds one folder a class; every file is looked at, though not at all of its pixels.

    Raises:
        DataError: there is no such folder, it holds no folders, a class has no file, or a file is no picture.
    """
    _require_pillow()
    from PIL import Image

    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder. Name one that holds a folder of pictures for each class.")
    classes = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    if not classes:
        raise DataError(f"{folder} holds no folders. Pictures lie in a folder for each class, as {folder}/cat/1.png.")
    files = [file for each in classes for file in _files(each)]
    for file in files:
        _look_at(Image, file)
    return Shelf(lambda index: Image.open(files[index]), [str(file) for file in files], [file.parent.name for file in files])


def _files(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    if not files:
        raise DataError(f"{folder} holds no picture.")
    return files


def _look_at(library: Any, file: Path) -> None:
    try:
        library.open(file).close()
    except Exception as error:  # Pillow raises whatever the reader of a format does
        raise DataError(f"{file} is not a picture that opens: {str(error).partition(chr(10))[0]}") from None


def picture_rows(folder: Path, columns: Sequence[str]) -> Shelf:
    """The pictures of a folder that `datasets` has saved.

    Args:
        folder: of one dataset.
        columns: those of the picture and of its label.

    Raises:
        DataError: it cannot be read, or has no such columns, or a label is none.
    """
    _require_pillow()
    table, (image, label) = saved_dataset(folder), columns
    for name in columns:
        if name not in table.column_names:
            known = ", ".join(f"`{column}`" for column in table.column_names)
            raise DataError(f"{folder} has no column `{name}`. Its columns are {known}.")
    names = [f"{folder}, row {number:,}" for number in range(1, len(table) + 1)]
    feature = table.features[label]
    labels = [label_of(class_name(feature, value), where, label) for value, where in zip(table[label], names, strict=True)]
    pictures = table.select_columns([image])
    return Shelf(lambda index: pictures[index][image], names, labels)


def _require_pillow() -> None:
    if find_spec("PIL") is None:
        raise DataError("Pictures need Pillow, which is not installed: pip install 'halfstep[train]'.")


class Pictures(Dataset[Batch]):
    """Pictures of a shelf, as a data set that hands out whole batches.

    Args:
        shelf: the pictures.
        classes: the number of each one's class.
        chosen: the numbers of those that are meant.
        processor: of transformers; makes pixels of them.
        mode: of Pillow, the channels that the model takes.
    """

    def __init__(self, shelf: Shelf, classes: Ints, chosen: Ints, processor: Any, mode: str) -> None:
        self._shelf, self._classes, self._chosen, self._processor, self._mode = shelf, classes, chosen, processor, mode

    def __len__(self) -> int:
        """The number of pictures."""
        return len(self._chosen)

    @property
    def num_predicted(self) -> int:
        """Classes that are predicted in all of them."""
        return len(self)

    def __getitem__(self, index: int) -> Batch:
        """One picture, as a batch of one."""
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The pictures as one batch: `pixel_values` of shape (pictures, channels, height, width) and `labels`."""
        chosen = self._chosen[np.asarray(indices, dtype=np.int64)]
        pictures = [self._shelf.opened(int(index), self._mode) for index in chosen]
        pixels = self._processor(images=pictures, return_tensors="np")["pixel_values"]
        return {
            "pixel_values": torch.from_numpy(np.ascontiguousarray(pixels, dtype=np.float32)),
            "labels": torch.from_numpy(self._classes[chosen]),
        }


def image_processor(folder: str | None, config: Any, asked: int | None) -> tuple[Any, Choice[int]]:
    """What makes pixels of pictures, in its form for Pillow and NumPy, and how many along a side.

    Args:
        folder: the model's; `None` where it has none.
        config: the model's.
        asked: the pixels along a side that the user wants.

    Raises:
        ModelError: the folder's own cannot be loaded.
    """
    _require_pillow()
    if folder is not None and (Path(folder) / PROCESSOR_FILE).is_file():
        return _of_folder(folder, asked)
    from transformers import ViTImageProcessorPil

    own = getattr(config, "image_size", None)
    size = asked or own or USUAL_SIZE
    middle = [0.5] * getattr(config, "num_channels", 3)
    processor = ViTImageProcessorPil(size={"height": size, "width": size}, image_mean=middle, image_std=middle)
    why = ASKED_FOR if asked else "that of the architecture" if own else "usual; the architecture takes any"
    return processor, Choice(value=size, reason=why)


def _of_folder(folder: str, asked: int | None) -> tuple[Any, Choice[int]]:
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
    except Exception as error:  # its checks raise classes of their own
        raise ModelError(f"`model.path`: the {PROCESSOR_FILE} of {folder} cannot be used: {root_cause(error)}") from error
    if asked is not None:
        processor.size = dict.fromkeys(dict(processor.size), asked)
        if getattr(processor, "crop_size", None):
            processor.crop_size = dict.fromkeys(dict(processor.crop_size), asked)
        return processor, Choice(value=asked, reason=ASKED_FOR)
    size = next(iter(dict(getattr(processor, "crop_size", None) or processor.size).values()))
    return processor, Choice(value=int(size), reason="that of the model folder's image processor")


def mode_of(config: Any) -> str:
    """The kind of Pillow's pictures that a model takes.

    Raises:
        ModelError: Pillow has none of so many channels.
    """
    channels = getattr(config, "num_channels", 3)
    if channels not in MODES:
        raise ModelError(f"The model takes pictures of {channels} channels, and files hold 1, 3 or 4.")
    return MODES[channels]

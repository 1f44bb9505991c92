"""What an update is made of: windows of a text, documents packed or filled up, pictures, or samples of the user's own."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.config.facts import Cut
from halfstep.config.options import TooLong
from halfstep.train.corpus import Tokens
from halfstep.train.documents import Documents, Fitted, fit
from halfstep.train.framed import Frame, Framed, fit_framed
from halfstep.train.own import OwnSamples
from halfstep.train.packing import Packed
from halfstep.train.padded import Padded
from halfstep.train.pictures import Pictures
from halfstep.train.windows import Windows

Samples = Windows | Packed | Padded | Framed | Pictures | OwnSamples
"""Data sets that hand out whole batches."""


Content = Tokens | Documents | Pictures | OwnSamples


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How data become sequences.

    Attributes:
        length: the most tokens of a sequence; `None` where there are no tokens.
        packing: whether several documents share one; `None` where the text is one stream.
        too_long: what becomes of longer documents; `None` where the text is one stream.
    """

    length: int | None
    packing: bool | None
    too_long: TooLong | None


class Source:
    """A text, documents, pictures or samples, and what they make in the shape that was asked for last.

    Args:
        content: one stream of tokens, documents, or samples of which the shape is their own.
        frame: what stands around each document, for models that look both ways.
    """

    def __init__(self, content: Content, frame: Frame | None = None) -> None:
        self.content, self._frame = content, frame
        self._made: dict[Shape, tuple[Samples, Fitted | None]] = {}

    @property
    def num_tokens(self) -> int:
        """All its tokens; where it has none, its samples."""
        return self.content.num_tokens if isinstance(self.content, Documents) else len(self.content)

    def samples(self, shape: Shape) -> Samples:
        """The samples of a shape; asked for again, the same ones.

        Raises:
            DataError: no document fits.
        """
        return self._make(shape)[0]

    def fitted(self, shape: Shape) -> Fitted | None:
        """What fitting the documents cost; `None` where the text is one stream."""
        return self._make(shape)[1]

    def cut(self, length: int, packing: bool | None, too_long: TooLong) -> Cut:
        """How many sequences there are, and how much is predicted in them."""
        samples = self.samples(Shape(length=length, packing=packing, too_long=too_long))
        assert not isinstance(samples, OwnSamples)
        return Cut(sequences=len(samples), predicted=samples.num_predicted)

    def _make(self, shape: Shape) -> tuple[Samples, Fitted | None]:
        if shape not in self._made:
            self._made.clear()
            self._made[shape] = _samples(self.content, shape, self._frame)
        return self._made[shape]


def _samples(content: Content, shape: Shape, frame: Frame | None) -> tuple[Samples, Fitted | None]:
    if isinstance(content, (Pictures, OwnSamples)):
        return content, None
    assert shape.length is not None
    if not isinstance(content, Documents):
        return Windows(content, shape.length), None
    assert shape.too_long is not None
    if frame is not None:
        fitted = fit_framed(content, shape.length, shape.too_long, frame)
        return Framed(fitted.documents, frame), fitted
    fitted = fit(content, shape.length, shape.too_long)
    samples = Packed(fitted.documents, shape.length) if shape.packing else Padded(fitted.documents)
    return samples, fitted

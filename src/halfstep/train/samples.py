"""What an update is made of: windows of a text, packed documents, or documents that are filled up."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.config.facts import Cut
from halfstep.config.options import TooLong
from halfstep.train.corpus import Tokens
from halfstep.train.documents import Documents, Fitted, fit
from halfstep.train.packing import Packed
from halfstep.train.padded import Padded
from halfstep.train.windows import Windows

Samples = Windows | Packed | Padded
"""Data sets that hand out whole batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How data become sequences.

    Attributes:
        length: the most tokens of a sequence.
        packing: whether several documents share one; `None` where the text is one stream.
        too_long: what becomes of longer documents; `None` where the text is one stream.
    """

    length: int
    packing: bool | None
    too_long: TooLong | None


class Source:
    """A text or documents, and the samples that they make in the shape that was asked for last.

    Args:
        content: one stream of tokens, or documents.
    """

    def __init__(self, content: Tokens | Documents) -> None:
        self.content = content
        self._made: dict[Shape, tuple[Samples, Fitted | None]] = {}

    @property
    def num_tokens(self) -> int:
        """All its tokens."""
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

    def cut(self, length: int, packing: bool, too_long: TooLong) -> Cut:
        """How many sequences there are, and how many tokens are predicted in them."""
        samples = self.samples(Shape(length=length, packing=packing, too_long=too_long))
        return Cut(sequences=len(samples), predicted=samples.num_predicted)

    def _make(self, shape: Shape) -> tuple[Samples, Fitted | None]:
        if shape not in self._made:
            self._made.clear()
            self._made[shape] = _samples(self.content, shape)
        return self._made[shape]


def _samples(content: Tokens | Documents, shape: Shape) -> tuple[Samples, Fitted | None]:
    if not isinstance(content, Documents):
        return Windows(content, shape.length), None
    assert shape.too_long is not None
    fitted = fit(content, shape.length, shape.too_long)
    samples = Packed(fitted.documents, shape.length) if shape.packing else Padded(fitted.documents)
    return samples, fitted

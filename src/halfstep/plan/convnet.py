"""Residual convolutional networks: shapes from a Hugging Face `resnet` configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

IMAGE_SIDE = 224


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """One convolution with its batch normalisation.

    Attributes:
        inputs: channels that come in.
        outputs: channels that go out.
        kernel: side of the kernel.
        side: side of what goes out.
        activated: whether a ReLU follows at once.
        ends_block: whether the block's sum and its ReLU follow.
    """

    inputs: int
    outputs: int
    kernel: int
    side: int
    activated: bool = True
    ends_block: bool = False

    @property
    def parameters(self) -> int:
        """Of the kernel and of its normalisation."""
        return self.inputs * self.outputs * self.kernel**2 + 2 * self.outputs

    @property
    def elements(self) -> int:
        """Numbers that it puts out for an image."""
        return self.outputs * self.side**2

    @property
    def flops(self) -> int:
        """Operations of a forward for an image: a multiplication and an addition a weight and place."""
        return 2 * self.inputs * self.outputs * self.kernel**2 * self.side**2

    @property
    def kept(self) -> int:
        """Numbers that backward needs: what goes into the normalisation, and what a ReLU puts out."""
        return self.elements * (1 + (self.activated or self.ends_block))


@dataclass(frozen=True, slots=True, kw_only=True)
class Convnet:
    """A residual network.

    Attributes:
        name: what the user called it.
        convolutions: in the order in which they run.
        classes: what it tells apart.
    """

    name: str
    convolutions: tuple[Convolution, ...]
    classes: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> Convnet:
        """From a `config.json` of model type "resnet" (He et al. 2015; defaults are those of ResNet-50)."""
        return cls(name=name, convolutions=tuple(_convolutions(config)), classes=classes_of(config))

    @property
    def unit(self) -> str:
        """What throughput counts."""
        return "images"

    @property
    def fixed_length(self) -> int:
        """An image is one sample, whatever is cut from it."""
        return 1

    @property
    def features(self) -> int:
        """Width of what the classifier sees."""
        return self.convolutions[-1].outputs

    @property
    def parameters(self) -> int:
        """All of them."""
        return sum(each.parameters for each in self.convolutions) + (self.features + 1) * self.classes

    @property
    def flops(self) -> int:
        """Operations of a forward for an image."""
        return sum(each.flops for each in self.convolutions) + 2 * self.features * self.classes

    @property
    def kept(self) -> int:
        """Numbers that backward needs for an image."""
        return sum(each.kept for each in self.convolutions) + 3 * IMAGE_SIDE**2 + self.convolutions[0].elements // 4


def classes_of(config: Mapping[str, Any]) -> int:
    """Classes that the configuration of an image classifier tells apart; two where it names none, as transformers has it."""
    return int(config.get("num_labels") or len(config.get("id2label", ())) or 2)


def _convolutions(config: Mapping[str, Any]) -> Iterator[Convolution]:
    widths, depths = config.get("hidden_sizes", [256, 512, 1024, 2048]), config.get("depths", [3, 4, 6, 3])
    bottleneck = config.get("layer_type", "bottleneck") == "bottleneck"
    before, side = config.get("embedding_size", 64), IMAGE_SIDE // 4
    yield Convolution(inputs=config.get("num_channels", 3), outputs=before, kernel=7, side=IMAGE_SIDE // 2)
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        for block in range(depth):
            halves = block == 0 and (stage > 0 or config.get("downsample_in_first_stage", False))
            yield from _block(before, width, side, halves=halves, bottleneck=bottleneck)
            side, before = (side // 2 if halves else side), width


def _block(before: int, width: int, side: int, *, halves: bool, bottleneck: bool) -> Iterator[Convolution]:
    after = side // 2 if halves else side
    if before != width or halves:
        yield Convolution(inputs=before, outputs=width, kernel=1, side=after, activated=False)
    if bottleneck:
        narrow = width // 4
        yield Convolution(inputs=before, outputs=narrow, kernel=1, side=side)
        yield Convolution(inputs=narrow, outputs=narrow, kernel=3, side=after)
        yield Convolution(inputs=narrow, outputs=width, kernel=1, side=after, activated=False, ends_block=True)
    else:
        yield Convolution(inputs=before, outputs=width, kernel=3, side=after)
        yield Convolution(inputs=width, outputs=width, kernel=3, side=after, activated=False, ends_block=True)

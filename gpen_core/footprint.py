"""How much memory a network takes, estimated before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from gpen_core.config import GeneratorConfig, PictureFormat

# Copies of its largest feature map that a network needs for a face while it runs. Measured with the published widths,
# 512 to 2048 px: eagerly 6 to 8, the process's overhead included; with our GPU kernels 2 to 2.6.
EAGER_MAPS, KERNEL_MAPS = 8, 3
# Values of the largest map of a published network at T pixels: 65536 / T channels of T x T.
PUBLISHED = 65536


@dataclass(frozen=True)
class Footprint:
    """Memory of a network in bytes.

    weights: from when it is loaded. face: for each face in a call. batch: faces in a call at most.
    keeps: the memory of a call stays, once for each batch size (1, 2, 4, ...), as that of recorded graphs does.
    """

    weights: int
    face: int
    batch: int
    keeps: bool = False

    def held(self, most: int) -> int:
        """Between calls, the largest of which had `most` faces."""
        return self.weights + (self.face * (2 * min(most, self.batch) - 1) if self.keeps and most else 0)

    def working(self, count: int, most: int) -> int:
        """During a call with `count` faces, after others with `most` of them at most."""
        if self.keeps:
            return self.held(max(count, most))
        return self.weights + self.face * min(count, self.batch)


def largest_map(config: PictureFormat) -> int:
    """Values of the largest feature map for one face; as published where the widths are not known."""
    if not isinstance(config, GeneratorConfig):
        return PUBLISHED * max(config.input_size, config.output_size)
    entering = config.width(config.input_size) * config.input_size**2
    return max(entering, config.layer_width(config.output_size) * config.output_size**2)


def exported_footprint(config: PictureFormat, size: int, batch: int, width: int = 4) -> Footprint:
    """Of an exported network in a file of `size` bytes, with `batch` faces in a call and `width` bytes a value."""
    return Footprint(size, EAGER_MAPS * width * largest_map(config), batch)

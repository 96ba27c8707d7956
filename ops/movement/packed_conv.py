"""The operands of the step of a convolution, in the layouts of its kernel."""

from __future__ import annotations

import attrs

from subgraph.engine.planner.operands import Argument, Operand
from subgraph.ops.shared.tile_planning import Activation, Tiles

from .geometry import Geometry


@attrs.frozen
class ConvOutput:
    """The output of a convolution: every ``steps``-th pixel of y from ``offset`` on.

    Attributes:
        y: Output in the blocked layout, or in the layout "bfloat16" if matrix tiles write it.
        residual: Array of the same shape that is added, in one of these layouts; 0: none.
        steps: Pixels between outputs along D, H, W.
        offset: Index of the first output's pixel.
        sizes: Spatial sizes (D, H, W) of y; None: those of the convolution's output.
    """

    y: Argument
    residual: Argument = 0
    steps: tuple[int, int, int] = (1, 1, 1)
    offset: int = 0
    sizes: tuple[int, int, int] | None = None

    @property
    def whole(self) -> bool:
        """Whether the outputs are all pixels of y."""
        return self.sizes is None and self.steps == (1, 1, 1)

    def strides(self, target: tuple[int, int, int], pixel: int) -> dict[str, int]:
        """Return the arguments of kernels that say where each output lies in y.

        Args:
            target: Spatial sizes of the convolution's output.
            pixel: Bytes of a pixel of a block.
        """
        depth, height, width = self.sizes or target
        return {
            "y_column": self.steps[2],
            "y_row": self.steps[1] * width,
            "y_plane": self.steps[0] * height * width,
            "y_block": depth * height * width,
            "y_offset": self.offset * pixel,
        }


@attrs.frozen
class PackedConv:
    """The operands of the step of a convolution, in the layouts of its kernel.

    Attributes:
        of: The contraction tiles.
        g: Sizes of the convolution.
        x: Input, in the blocked layout unless the kernel reads another one.
        weight: Weights, packed as the kernel reads them.
        bias: Bias of all outputs, padded to whole blocks; 0: none.
        out: Output and residual.
        act: The activation.
    """

    of: Tiles
    g: Geometry
    x: Argument
    weight: Argument
    bias: Argument
    out: ConvOutput
    act: Activation


def is_rounded(operand: Argument) -> bool:
    """Return whether an argument of a step is an image in the layout "bfloat16"."""
    return isinstance(operand, Operand) and operand.layout == "bfloat16"

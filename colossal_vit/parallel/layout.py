"""The parallel layout: data × pipeline × tensor."""

from dataclasses import dataclass

from colossal_vit.config.schema import TENSOR_MODES
from colossal_vit.errors import UserError, multiples_near
from colossalai.context import Config
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc

# The dimensions in which a tensor-parallel mode arranges its ranks: q, q² or q³ of them, and in 2.5D `depth` squares.
_DIMENSIONS = dict(zip(TENSOR_MODES, (1, 2, 2, 3), strict=True))
_SHAPES = {"2d": "a square, q² processes", "2.5d": "depth × q², and depth is {depth}", "3d": "a cube, q³ processes"}


@dataclass(frozen=True)
class Layout:
    """Data, pipeline and tensor parallel sizes, whose product is the world size.

    Attributes:
        data, pipeline, tensor: sizes.
        tensor_mode: None, '1d', '2d', '2.5d' or '3d'.
        side: q, the number of parts into which heads and hidden size are split: the tensor-parallel size in 1D, the
            side of the square of ranks in 2D and 2.5D, of the cube in 3D.
    """

    data: int
    pipeline: int
    tensor: int
    tensor_mode: str | None
    side: int

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.data * self.pipeline * self.tensor

    @property
    def batch_parts(self) -> int:
        """Number of parts into which the tensor-parallel ranks split a batch."""
        return self.side ** (_DIMENSIONS[self.tensor_mode] - 1) if self.tensor_mode else 1

    @property
    def hidden_parts(self) -> int:
        """Number of parts into which they split the hidden size of activations between layers; 1 in 1D."""
        return self.side if self.batch_parts > 1 else 1

    @property
    def depth(self) -> int | None:
        """Number of squares in 2.5D; None in other modes."""
        return self.tensor // self.side**2 if self.tensor_mode == "2.5d" else None

    @classmethod
    def of(cls, config: Config, world_size: int) -> "Layout":
        """Return the layout of `config.parallel` on `world_size` processes.

        Raises:
            UserError: if the tensor-parallel size does not fit its mode, or the world size is not a multiple of
                pipeline × tensor.
        """
        pipeline, tensor = config.parallel.pipeline, config.parallel.tensor
        side = _side(tensor.mode, tensor.size, tensor.get("depth") or 1)
        model = pipeline * tensor.size
        if world_size % model:
            raise UserError(
                f"world size {world_size} does not fit parallel.pipeline = {pipeline} × parallel.tensor.size = "
                f"{tensor.size}: start {multiples_near(world_size, model)} processes (a multiple of {model})"
            )
        return cls(world_size // model, pipeline, tensor.size, tensor.mode, side)

    @classmethod
    def current(cls) -> "Layout":
        """Return the layout of this process's initialised process groups."""
        return cls.of(gpc.config, gpc.get_world_size(ParallelMode.GLOBAL))

    def global_batch(self, config: Config) -> int:
        """Return the number of images per optimizer step: BATCH_SIZE × gradient_accumulation × data-parallel size."""
        return config.BATCH_SIZE * config.gradient_accumulation * self.data

    @property
    def short(self) -> str:
        """The name in docs/glossary.md's words, without what is not split: 'DP 2 × PP 2 × 1D 4'; or 'one process'."""
        sizes = {"DP": self.data, "PP": self.pipeline, (self.tensor_mode or "").upper(): self.tensor}
        return " × ".join(f"{kind} {size}" for kind, size in sizes.items() if size > 1) or "one process"

    def __str__(self) -> str:
        tensor = f" ({self.tensor_mode})" if self.tensor_mode else ""
        return f"data {self.data} × pipeline {self.pipeline} × tensor {self.tensor}{tensor}"


def arrange(mode: str, size: int) -> list[int]:
    """Return the sides q in which a tensor-parallel mode can arrange `size` ranks: at most one but in 2.5D."""
    squares = {q: q ** _DIMENSIONS[mode] for q in range(2, size + 1)}
    return [q for q, ranks in squares.items() if ranks == size or (mode == "2.5d" and size % ranks == 0)]


def _side(mode: str | None, size: int, depth: int) -> int:
    """Return the side q of the tensor-parallel ranks, see `Layout`."""
    if mode is None:
        if size > 1:
            modes = " or ".join([", ".join(map(repr, TENSOR_MODES[:-1])), repr(TENSOR_MODES[-1])])
            raise UserError(f"parallel.tensor.size = {size} needs parallel.tensor.mode = {modes}; None needs 1")
        return 1
    if mode == "1d":
        return size
    sizes = [depth * q ** _DIMENSIONS[mode] for q in range(2, 65)]
    if size not in sizes:
        below, above = [s for s in sizes if s < size][-1:], [s for s in sizes if s > size][:1]
        raise UserError(
            f"parallel.tensor.size = {size}, but mode '{mode}' needs {_SHAPES[mode].format(depth=depth)}: use "
            f"{' or '.join(map(str, below + above))}"
        )
    return sizes.index(size) + 2

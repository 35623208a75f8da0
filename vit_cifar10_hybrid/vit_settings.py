"""The config keys of the Vision Transformer in vit.py, and which of their values fit each other."""

from colossal_vit.config.load import num_model_chunks
from colossal_vit.config.schema import PIPELINE, ResumableSetting, Side
from colossal_vit.config.settings import REQUIRED, Ignored, Setting, Settings
from colossal_vit.config.types import Bool, PositiveInt, one_of, real, whole
from colossal_vit.errors import UserError, multiples_near
from colossal_vit.parallel.layout import Layout
from colossalai.context import Config

SETTINGS: Settings = {
    "PATCH_SIZE": Setting(Side, "side of a patch, in pixels", REQUIRED),
    "HIDDEN_SIZE": Setting(whole(1, 2**16), "width", REQUIRED),
    "DEPTH": Setting(whole(1, 256), "transformer blocks", REQUIRED),
    "NUM_HEADS": Setting(whole(1, 2**16), "attention heads", REQUIRED),
    "MLP_RATIO": Setting(real(0.001, 100), "hidden units of an MLP ÷ HIDDEN_SIZE", 4),
    "POOL": Setting(
        one_of("token", "avg"), "what the head sees: the class token, or the mean of the patches' tokens", "token"
    ),
    "CHECKPOINT": ResumableSetting(
        Bool, "compute activations again in the backward pass instead of keeping them", False
    ),
    "SEQ_LENGTH": ResumableSetting(PositiveInt, "tokens, checked against the model"),
    **PIPELINE,
}
# What the published config for data parallelism has besides.
IGNORED: Settings = {
    "dali": Ignored("TFRecords are read by another LOADER, and images are not mixed"),
    "model": Ignored("each process has the whole model"),
}


def check_vit(config: Config, layout: Layout) -> None:
    """Check that the model's sizes fit each other and the layout.

    Raises:
        UserError: naming the values and what is allowed.
    """

    def divides(size: int, whole: str, by: str) -> None:
        if config[whole] % size:
            nearest = multiples_near(config[whole], size)
            raise UserError(f"{whole} = {config[whole]} is not a multiple of {by} = {size}: use {nearest}")

    divides(config.PATCH_SIZE, "IMG_SIZE", "PATCH_SIZE")
    divides(config.NUM_HEADS, "HIDDEN_SIZE", "NUM_HEADS")
    hidden = config.HIDDEN_SIZE
    mlp, parts = int(hidden * config.MLP_RATIO), layout.side ** (2 if layout.hidden_parts > 1 else 1)
    if mlp < 1 or mlp % parts:
        units = max(round(mlp / parts), 1) * parts
        fits = units // hidden if units % hidden == 0 else round((units + 0.5) / hidden, 4)
        raise UserError(
            f"MLP_RATIO = {config.MLP_RATIO} of HIDDEN_SIZE = {hidden} makes {mlp} hidden units, but it takes a "
            f"multiple of {parts}{f' in {layout.tensor_mode}' if layout.tensor_mode else ''}: use {fits}"
        )
    divides(layout.side, "NUM_HEADS", f"the side of parallel.tensor.size = {layout.tensor} in {layout.tensor_mode}")
    if layout.hidden_parts > 1:
        divides(layout.side**2, "HIDDEN_SIZE", f"the square of the side {layout.side} of {layout.tensor_mode}")
        divides(layout.batch_parts, "BATCH_SIZE", f"the parts of a batch in {layout.tensor_mode}")
    num_chunks = num_model_chunks(config)
    if layout.pipeline * num_chunks > config.DEPTH:
        raise UserError(
            f"parallel.pipeline = {layout.pipeline} stages of {num_chunks} chunk(s) for DEPTH = {config.DEPTH} blocks: "
            f"each needs a block of its own"
        )
    if num_chunks > 1 and (layout.pipeline == 1 or config.get("NUM_MICRO_BATCHES", 0) % layout.pipeline):
        raise UserError(
            f"model.num_chunks = {num_chunks} needs a pipeline, and NUM_MICRO_BATCHES a multiple of its "
            f"{layout.pipeline} stages"
        )
    sequence = (config.IMG_SIZE // config.PATCH_SIZE) ** 2 + 1
    if config.get("SEQ_LENGTH", sequence) != sequence:
        raise UserError(
            f"SEQ_LENGTH = {config.SEQ_LENGTH}, but IMG_SIZE {config.IMG_SIZE} and PATCH_SIZE {config.PATCH_SIZE} make "
            f"{sequence} tokens: ({config.IMG_SIZE} // {config.PATCH_SIZE})² patches and the class token"
        )
    if layout.pipeline > 1:
        if "NUM_MICRO_BATCHES" not in config:
            raise UserError(
                f"NUM_MICRO_BATCHES is missing: a pipeline needs it, at best a multiple of {layout.pipeline}"
            )
        divides(config.NUM_MICRO_BATCHES, "BATCH_SIZE", "NUM_MICRO_BATCHES")
        if (config.BATCH_SIZE // config.NUM_MICRO_BATCHES) % layout.batch_parts:
            raise UserError(
                f"a micro-batch of BATCH_SIZE {config.BATCH_SIZE} // NUM_MICRO_BATCHES {config.NUM_MICRO_BATCHES} is "
                f"not a multiple of the {layout.batch_parts} parts that {layout.tensor_mode} splits it into"
            )
        shape = (config.BATCH_SIZE // config.NUM_MICRO_BATCHES, sequence, config.HIDDEN_SIZE)
        if tuple(config.get("TENSOR_SHAPE", shape)) != shape:
            raise UserError(
                f"TENSOR_SHAPE = {tuple(config.TENSOR_SHAPE)}, but a micro-batch is (BATCH_SIZE // NUM_MICRO_BATCHES, "
                f"sequence length, HIDDEN_SIZE) = {shape}"
            )

"""The config keys of the Vision Transformer in vit.py."""

from colossal_vit.config.schema import PIPELINE, Free, Side
from colossal_vit.config.settings import REQUIRED, Ignored, Setting, Settings
from colossal_vit.config.types import Bool, PositiveInt, one_of, real, whole

SETTINGS: Settings = {
    "PATCH_SIZE": Setting(Side, "side of a patch, in pixels", REQUIRED),
    "HIDDEN_SIZE": Setting(whole(1, 2**16), "width", REQUIRED),
    "DEPTH": Setting(whole(1, 256), "transformer blocks", REQUIRED),
    "NUM_HEADS": Setting(whole(1, 2**16), "attention heads", REQUIRED),
    "MLP_RATIO": Setting(real(0.001, 100), "hidden units of an MLP ÷ HIDDEN_SIZE", 4),
    "POOL": Setting(
        one_of("token", "avg"), "what the head sees: the class token, or the mean of the patches' tokens", "token"
    ),
    "CHECKPOINT": Free(Bool, "compute activations again in the backward pass instead of keeping them", False),
    "SEQ_LENGTH": Free(PositiveInt, "tokens, checked against the model"),
    **PIPELINE,
}
# What the published config for data parallelism has besides.
IGNORED: Settings = {
    "dali": Ignored("TFRecords are read by another LOADER, and images are not mixed"),
    "model": Ignored("each process has the whole model"),
}

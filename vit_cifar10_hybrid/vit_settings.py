"""The config keys of the Vision Transformer in vit.py."""

from colossal_vit.config.rules import BOOL, POSITIVE_INT, number, one_of, whole
from colossal_vit.config.schema import PIPELINE, SIDE, Free
from colossal_vit.config.settings import REQUIRED, Ignored, Setting, Settings

SETTINGS: Settings = {
    "PATCH_SIZE": Setting(SIDE, "side of a patch, in pixels", REQUIRED),
    "HIDDEN_SIZE": Setting(whole(1, 2**16), "width", REQUIRED),
    "DEPTH": Setting(whole(1, 256), "transformer blocks", REQUIRED),
    "NUM_HEADS": Setting(whole(1, 2**16), "attention heads", REQUIRED),
    "MLP_RATIO": Setting(number(0.001, 100), "hidden units of an MLP ÷ HIDDEN_SIZE", 4),
    "POOL": Setting(
        one_of("token", "avg"), "what the head sees: the class token, or the mean of the patches' tokens", "token"
    ),
    "CHECKPOINT": Free(BOOL, "compute activations again in the backward pass instead of keeping them", False),
    "SEQ_LENGTH": Free(POSITIVE_INT, "tokens, checked against the model"),
    **PIPELINE,
}
# What the published config for data parallelism has besides.
IGNORED: Settings = {
    "dali": Ignored("TFRecords are read by another LOADER, and images are not mixed"),
    "model": Ignored("each process has the whole model"),
}

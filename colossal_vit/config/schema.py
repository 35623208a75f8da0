"""The keys that every config file may have: what they mean, what they must be, their defaults.

A model and a loader bring others, their `SETTINGS`. A config that is to be read alone names what it learns by.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from colossal_vit.config.settings import REQUIRED, Ignored, Setting, Settings, SettingsBlock
from colossal_vit.config.types import (
    Area,
    Bool,
    Channels,
    Dicts,
    Fraction,
    Mode,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Shape,
    Share,
    ShareAbove0,
    Text,
    one_of,
    real,
    whole,
)
from colossalai.legacy.amp import AMP_TYPE

TENSOR_MODES = "1d", "2d", "2.5d", "3d"
Side = whole(1, 8192)  # an image or a patch has so many pixels
# The precisions in which the loss has a scale that can be set.
SCALED = {"mode": (AMP_TYPE.TORCH, AMP_TYPE.NAIVE), "dtype": (None, "fp16")}
NAIVE = {**SCALED, "mode": (AMP_TYPE.NAIVE,)}

ResumableSetting = partial(Setting, affects_training=False)  # a run may go on with another value

TRAINING: Settings = {
    "SEED": Setting(whole(0, 2**32 - 1), "seed of weights, order of images and random numbers", 1024),
    "BATCH_SIZE": ResumableSetting(
        PositiveInt,
        "images that a data-parallel rank takes at a time; global batch = BATCH_SIZE × gradient_accumulation × "
        "data-parallel size",
        REQUIRED,
    ),
    "NUM_EPOCHS": ResumableSetting(PositiveInt, "length of the training, in epochs", REQUIRED),
    "WARMUP_EPOCHS": Setting(NonNegativeInt, "epochs of linear warm-up, part of NUM_EPOCHS", 0),
    "SCHEDULE": Setting(
        one_of("linear", "cosine"), "how the rate falls after the warm-up, to 0 if nothing else is said", "cosine"
    ),
    "MIN_LEARNING_RATE": Setting(
        NonNegative, "final learning rate of the cosine", 0.0, needs={"SCHEDULE": ("cosine",)}
    ),
    "OPTIMIZER": Setting(one_of("adamw", "sgd", "lamb", "muon"), "the optimizer", "adamw"),
    "MOMENTUM": Setting(Fraction, "momentum of SGD", 0.9, needs={"OPTIMIZER": ("sgd",)}),
    "MUON_MOMENTUM": Setting(Fraction, "momentum of Muon", 0.95, needs={"OPTIMIZER": ("muon",)}),
    "MUON_NESTEROV": Setting(Bool, "Nesterov's momentum in Muon", True, needs={"OPTIMIZER": ("muon",)}),
    "EPSILON": Setting(
        Positive,
        "what AdamW and LAMB add to √v; 1e-8 in AdamW, Muon's too, 1e-6 in LAMB",
        needs={"OPTIMIZER": ("adamw", "lamb", "muon")},
    ),
    "LEARNING_RATE": Setting(Positive, "the rate after the warm-up", 3e-3),
    "WEIGHT_DECAY": Setting(NonNegative, "weight decay: decoupled in AdamW, LAMB and Muon, L2 in SGD", 0.3),
    "DECAY_VECTORS": Setting(
        Bool,
        "False: biases, norms, class token and position embedding have no weight decay, and in LAMB no trust ratio",
        True,
    ),
    "LAYER_DECAY": Setting(
        ShareAbove0, "layer-wise learning-rate decay, timm's layer_decay; the head has LEARNING_RATE", 1.0
    ),
    "LABEL_SMOOTHING": Setting(Fraction, "label smoothing ε", 0.1),
    "bce": SettingsBlock(
        "BCE loss, one sigmoid per class (DeiT III), in place of cross entropy",
        {
            "threshold": Setting(Share, "targets above it become 1, all others 0; targets stay"),
            "sum_classes": Setting(Bool, "sum the classes' losses instead of their mean", False),
        },
    ),
    "GLOBAL_BATCH": ResumableSetting(
        PositiveInt, "images of a step, that ELASTIC and `--dry-run` keep on other numbers of processes"
    ),
    "ELASTIC": ResumableSetting(
        Bool,
        "keep GLOBAL_BATCH on any number of processes, by smaller BATCH_SIZE and another gradient_accumulation; those "
        "that no replica needs wait",
        False,
    ),
    "ELASTIC_LAYOUTS": ResumableSetting(
        Dicts,
        "other values of `parallel`: ELASTIC takes the first, after `parallel` itself, with work for most processes",
        needs={"ELASTIC": ()},
    ),
}
DATA: Settings = {
    "DATA": ResumableSetting(Text, "folder of the data set; the environment's DATA, else the digits"),
    "LOADER": Setting(
        Text,
        "file that reads DATA, relative to the config, the script or the working directory; the script's own",
    ),
    "SYNTHETIC": Setting(Bool, "train on random images, without data; the same in every layout", False),
    "MEAN": Setting(
        Channels,
        "mean of each channel, from 0 to 1, that images are normalised with; that of the weights of finetune, else of "
        "the format",
    ),
    "STD": Setting(Channels, "the same for the standard deviation"),
    "CACHE_SIZE": Setting(Side, "side of the decoded images of class folders that are kept, in pixels; IMG_SIZE × 8/7"),
    "KEEP_DECODED": ResumableSetting(
        Bool, "decode class folders once, into a file beside them, where that fits; False: for each batch", True
    ),
    "TEST_FRACTION": Setting(
        real(0.001, 0.999), "share of each class to test on, of your own images without a folder for that", 0.2
    ),
    "CROP_AREA": Setting(Area, "smallest and largest share of an image that a random crop is", (0.08, 1.0)),
    "FLIP": Setting(Bool, "mirror training images at random", True),
    "REPEATS": Setting(
        whole(1, 100), "repeated augmentation: how often an image comes in an epoch, which has as many fewer images", 1
    ),
    "augment": SettingsBlock(
        "what is done to training images once they are cropped and mirrored",
        {
            "policy": Setting(one_of("rand", "three"), "RandAugment or DeiT III's 3-Augment"),
            "n": Setting(whole(1, 20), "operations of RandAugment on an image", 2, needs={"policy": ("rand",)}),
            "m": Setting(whole(0, 30), "magnitude of RandAugment's operations", 9, needs={"policy": ("rand",)}),
            "color_jitter": Setting(real(0, 10), "brightness, contrast and saturation change by up to this", 0.0),
            "erase": Setting(Share, "how often a part of an image is replaced by noise", 0.0),
        },
        switches=("policy", "color_jitter", "erase"),
    ),
}
FINE_TUNING: Settings = {
    "finetune": SettingsBlock(
        "start from trained weights, and train all of the model or a part of it",
        {
            "weights": Setting(
                Text,
                "a model of timm, a file of safetensors or torch.save, a folder of timm or transformers with one, or "
                "a run or checkpoint of these scripts",
            ),
            "checkpoint_key": Setting(
                Text,
                "which of several models in a file to take, such as 'teacher' or 'model_ema'",
                needs={"weights": ()},
            ),
            "head": Setting(one_of("new", "keep"), "start with a head of zeros, or with that of the weights", "new"),
            "frozen_blocks": Setting(
                NonNegativeInt, "so many blocks, the first ones, stay as they are, and the embedding with them", 0
            ),
            "linear_probe": Setting(Bool, "train the head only", False),
        },
    )
}
MODEL: Settings = {
    "IMG_SIZE": Setting(Side, "side of the images, in pixels; a multiple of the side of a patch", 224),
    "NUM_CLASSES": Setting(whole(1, 10**6), "classes; those of the data"),
    "DROP_RATE": Setting(Fraction, "dropout", 0.0),
    "DROP_PATH_RATE": Setting(Fraction, "stochastic depth of the last block; linear from 0", 0.0),
}
LAYOUT: Settings = {
    "parallel": SettingsBlock(
        "processes = data × pipeline × tensor",
        {
            "pipeline": Setting(PositiveInt, "pipeline stages", 1),
            "tensor": SettingsBlock(
                "tensor parallelism",
                {
                    "mode": Setting(one_of(None, *TENSOR_MODES), "how matrices are split", None),
                    "size": Setting(PositiveInt, "ranks: q² in 2D, depth × q² in 2.5D, q³ in 3D", 1),
                    "depth": Setting(PositiveInt, "number of squares in 2.5D", 1, needs={"mode": ("2.5d",)}),
                },
                {},
            ),
        },
        {},
        affects_training=False,
    ),
}
# Of a model that can be cut into pipeline stages.
PIPELINE: Settings = {
    "NUM_MICRO_BATCHES": ResumableSetting(PositiveInt, "micro-batches that a pipeline makes of BATCH_SIZE images"),
    "model": SettingsBlock(
        "interleaved pipeline",
        {"num_chunks": Setting(PositiveInt, "parts of the model on each stage", 1)},
        {},
        affects_training=False,
    ),
    "TENSOR_SHAPE": ResumableSetting(Shape, "what a stage hands to the next, (micro-batch, tokens, width), checked"),
}
FEATURES: Settings = {
    "gradient_accumulation": ResumableSetting(PositiveInt, "batches of BATCH_SIZE in an optimizer step", 1),
    "clip_grad_norm": Setting(NonNegative, "largest norm of the gradient; 0 does not clip", 0.0),
    "fp16": SettingsBlock(
        "mixed precision; None for fp32",
        {
            "mode": Setting(Mode, "what computes in half precision: docs/precision.md"),
            "dtype": Setting(
                one_of("fp16", "bf16"), "half-precision type; fp16 on CUDA, bf16 on a CPU", needs={"mode": ()}
            ),
            "opt_level": Setting(
                one_of("O0", "O1", "O2", "O3"), "optimization level of APEX; O1", needs={"mode": (AMP_TYPE.APEX,)}
            ),
            "half_residual": Setting(
                Bool,
                "residual sums in `dtype`, as NAIVE's: faster, and with less memory",
                False,
                needs={"mode": (AMP_TYPE.TORCH,)},
            ),
            "initial_scale": Setting(Positive, "initial loss scale; 2¹⁶", needs=SCALED),
            "growth_factor": Setting(real(1, 1e6), "growth of the loss scale; 2", needs=SCALED),
            "backoff_factor": Setting(real(1e-6, 0.99), "factor on the loss scale after an overflow; ½", needs=SCALED),
            "growth_interval": Setting(
                PositiveInt, "steps without overflow until the scale grows; 2000, NAIVE 1000", needs=SCALED
            ),
            "hysteresis": Setting(PositiveInt, "overflows until NAIVE lowers the scale; 2", needs=NAIVE),
            "min_scale": Setting(Positive, "smallest loss scale, NAIVE; 1", needs=NAIVE),
            "max_scale": Setting(Positive, "largest loss scale, NAIVE; 2³²", needs=NAIVE),
        },
        switches=("mode",),
    ),
    "ema": SettingsBlock(
        "an exponential moving average of the weights, evaluated beside them and kept in checkpoints",
        {
            "decay": Setting(Fraction, "share of the average so far after an optimizer step", 0.9999),
            "warmup": Setting(Bool, "let the decay grow to that, as 1 - step^(-2/3)", False),
        },
    ),
    "zero": SettingsBlock(
        "ZeRO: optimizer state and fp32 weights sharded over the data-parallel ranks",
        {"stage": Setting(one_of(1, 2, 3), "1: those; 2: also accumulated gradients; 3: also weights", REQUIRED)},
        affects_training=False,
    ),
    "checkpoint": SettingsBlock(
        "when to save; also after epochs",
        {
            "every_steps": Setting(PositiveInt, "optimizer steps from one checkpoint to the next"),
            "every_minutes": Setting(Positive, "minutes from one checkpoint to the next", 30),
            "keep": Setting(PositiveInt, "newest checkpoints to keep, beside the best one", 3),
        },
        {},
        affects_training=False,
    ),
    "LOG_EVERY": ResumableSetting(
        Positive, "seconds from one line of the log to the next, where no terminal has a progress bar", 30
    ),
    "torch_ddp": SettingsBlock(
        "arguments of DistributedDataParallel, which data parallelism without a pipeline takes",
        {
            "bucket_cap_mb": Setting(real(0.001, 10**6), "MB of gradients that are reduced together; 25"),
            "static_graph": Setting(Bool, "the same operations in every step"),
            "find_unused_parameters": Setting(Bool, "some parameters have no gradient"),
        },
        {},
        affects_training=False,
    ),
    "DTYPE": Setting(
        one_of("float32", "float64"), "precision of everything without fp16; float64 is for comparisons", "float32"
    ),
    "COMPILE": ResumableSetting(one_of(False, True, "auto"), "torch.compile; auto: on a GPU", "auto"),
    "TF32": Setting(Bool, "TensorFloat-32 in matrix products and convolutions in fp32", False),
    "cudnn_benchmark": ResumableSetting(Bool, "let cuDNN try its algorithms", False),
    "cudnn_deterministic": ResumableSetting(
        Bool, "only deterministic algorithms in cuDNN, attention and compiled kernels: slower, with more memory", False
    ),
}
GROUPS = {
    "Training": TRAINING,
    "Data": DATA,
    "Fine-tuning": FINE_TUNING,
    "Model": MODEL,
    "Layout": LAYOUT,
    "Features": FEATURES,
}
SCHEMA = {key: setting for group in GROUPS.values() for key, setting in group.items()}

# Names that published configs and earlier versions have for a setting, or for the settings in a block.
OLDER_NAMES = {
    "TENSOR_PARALLEL_SIZE": "parallel.tensor.size",
    "TENSOR_PARALLEL_MODE": "parallel.tensor.mode",
    "NUM_CHUNKS": "model.num_chunks",
    "LAMB_EXCLUDE_VECTORS": "DECAY_VECTORS",
    "dali.mixup_alpha": "mix.mixup",
    "dali.rand_augment": "augment",
    "fp16.init_scale": "fp16.initial_scale",
}


def meant_by(name: str, value: Any) -> Any:
    """Return what the value of an older name says in the words of the newer one."""
    if name == "LAMB_EXCLUDE_VECTORS":
        return not value
    return {"policy": "rand", **value} if name == "dali.rand_augment" and isinstance(value, Mapping) else value


def setting_at(path: str, schema: Settings = SCHEMA) -> Setting | SettingsBlock | Ignored | None:
    """Return the setting or block with a path, or with an older name, or the ignored key above it; None if there is
    none.
    """
    found: Setting | SettingsBlock | Ignored | None = None
    settings = schema
    for key in OLDER_NAMES.get(path, path).split("."):
        found = settings.get(key)
        if isinstance(found, Ignored):
            break
        settings = found.settings if isinstance(found, SettingsBlock) else {}
    return found

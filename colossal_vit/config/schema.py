"""Every key that a config file may have: what it means, what it must be, its default, and which scripts use it."""

from typing import Any

from colossal_vit.config.machine import MACHINE
from colossal_vit.config.rules import (
    AREA,
    BOOL,
    FRACTION,
    MAGNITUDE,
    MODE,
    NON_NEGATIVE,
    NON_NEGATIVE_INT,
    OPERATIONS,
    POSITIVE,
    POSITIVE_INT,
    SHAPE,
    SHARE,
    SHARE_ABOVE_0,
    TENSOR_MODE,
    TEXT,
    number,
    one_of,
    whole,
)
from colossal_vit.config.settings import (
    CALTECH101,
    DP,
    HYBRID,
    IMAGENET,
    OPTIONAL,
    REQUIRED,
    SCRIPTS,
    Block,
    Each,
    Setting,
    default_for,
)
from colossalai.legacy.amp import AMP_TYPE

TIMM = (DP, CALTECH101, IMAGENET)  # scripts that train a model of timm
SIDE = whole(1, 8192)  # of images and patches, in pixels
SCALED = {"mode": (AMP_TYPE.TORCH, AMP_TYPE.NAIVE), "dtype": (None, "fp16")}  # what has a loss scale that can be set
NAIVE = {**SCALED, "mode": (AMP_TYPE.NAIVE,)}

GROUPS: dict[str, dict[str, Setting | Block]] = {
    "Training": {
        "SEED": Setting(whole(0, 2**32 - 1), "seed of weights, order of images and random numbers", 1024),
        "BATCH_SIZE": Setting(
            POSITIVE_INT,
            "images that a data-parallel rank takes at a time; global batch = BATCH_SIZE × gradient_accumulation × "
            "data-parallel size",
            REQUIRED,
        ),
        "NUM_EPOCHS": Setting(POSITIVE_INT, "length of the training, in epochs", REQUIRED),
        "WARMUP_EPOCHS": Setting(NON_NEGATIVE_INT, "epochs of linear warm-up, part of NUM_EPOCHS", Each((50, 0, 1, 0))),
        "SCHEDULE": Setting(
            one_of("linear", "cosine"),
            "how the rate falls after the warm-up, to 0 if nothing else is said",
            Each(("linear", "cosine", "linear", "linear")),
        ),
        "MIN_LEARNING_RATE": Setting(NON_NEGATIVE, "what a cosine falls to", 0.0, needs={"SCHEDULE": ("cosine",)}),
        "OPTIMIZER": Setting(one_of("adamw", "sgd", "lamb"), "the optimizer", Each(("lamb", "adamw", "sgd", "lamb"))),
        "MOMENTUM": Setting(FRACTION, "momentum of SGD", Each((0.9, 0.9, 0.0, 0.9)), needs={"OPTIMIZER": ("sgd",)}),
        "EPSILON": Setting(
            POSITIVE, "what AdamW and LAMB add to √v; 1e-8 and 1e-6", needs={"OPTIMIZER": ("adamw", "lamb")}
        ),
        "LEARNING_RATE": Setting(POSITIVE, "the rate after the warm-up", Each((1.8e-2, 3e-3, 1e-2, 1.8e-2))),
        "WEIGHT_DECAY": Setting(
            NON_NEGATIVE, "weight decay: decoupled in AdamW and LAMB, L2 in SGD", Each((0.1, 0.3, 0.1, 0.1))
        ),
        "DECAY_VECTORS": Setting(
            BOOL,
            "False: biases, norms, class token and position embedding have no weight decay, and in LAMB no trust ratio",
            True,
        ),
        "LAMB_EXCLUDE_VECTORS": Setting(BOOL, "the same as DECAY_VECTORS = False", False, (IMAGENET,)),
        "LAYER_DECAY": Setting(
            SHARE_ABOVE_0, "learning rate of a layer ÷ that of the next one; the head has LEARNING_RATE", 1.0
        ),
        "LABEL_SMOOTHING": Setting(FRACTION, "share of the target that all classes divide", Each((0.0, 0.1, 0.0, 0.0))),
        "bce": Block(
            "binary cross entropy in place of cross entropy, a question for each class",
            {
                "threshold": Setting(SHARE, "targets above it become 1, all others 0; without, targets stay"),
                "sum_classes": Setting(BOOL, "sum the classes' losses instead of their mean", False),
            },
        ),
        "GLOBAL_BATCH": Setting(
            POSITIVE_INT, "images of a step, that `--dry-run` keeps on other numbers of GPUs", OPTIONAL, (IMAGENET,)
        ),
        "IMAGES_PER_S": Setting(
            POSITIVE, "images/s of one GPU, from which `--dry-run` computes hours", OPTIONAL, (IMAGENET,)
        ),
    },
    "Data": {
        "DATA": Setting(TEXT, "folder of the data set; else the environment's DATA, else the digits sample"),
        "SYNTHETIC": Setting(BOOL, "train on one random batch, without data", False, (CALTECH101, IMAGENET)),
        "CACHE_SIZE": Setting(
            SIDE, "side of the decoded images that are kept, in pixels; IMG_SIZE × 8/7", OPTIONAL, (CALTECH101,)
        ),
        "TRAIN_PER_CLASS": Setting(
            POSITIVE_INT, "training images of each class; four fifths of them", OPTIONAL, (CALTECH101,)
        ),
        "CROP_PADDING": Setting(
            whole(0, 32), "pixels of border, of 32, that a random crop may reach into", 4, (DP, HYBRID)
        ),
        "CROP_AREA": Setting(
            AREA, "smallest and largest share of an image that a random crop is", (0.08, 1.0), (CALTECH101, IMAGENET)
        ),
        "FLIP": Setting(BOOL, "mirror training images at random", True),
        "REPEATS": Setting(
            whole(1, 100),
            "repeated augmentation: how often an image comes in an epoch, which has as many fewer images",
            1,
        ),
        "EVAL_CROP": Setting(
            number(0.1, 1), "side of the centre that is evaluated ÷ image's shorter side", 224 / 256, (IMAGENET,)
        ),
        "augment": Block(
            "what is done to training images once they are cropped and mirrored",
            {
                "policy": Setting(one_of("rand", "three"), "RandAugment or DeiT III's 3-Augment"),
                "n": Setting(OPERATIONS, "operations of RandAugment on an image", 2, needs={"policy": ("rand",)}),
                "m": Setting(MAGNITUDE, "magnitude of RandAugment's operations", 9, needs={"policy": ("rand",)}),
                "color_jitter": Setting(number(0, 10), "brightness, contrast and saturation change by up to this", 0.0),
                "erase": Setting(SHARE, "how often a part of an image is replaced by noise", 0.0),
            },
            switches=("policy", "color_jitter", "erase"),
        ),
        "mix": Block(
            "Mixup and CutMix: each training image with its neighbour in the batch",
            {
                "mixup": Setting(NON_NEGATIVE, "α of Mixup's Beta distribution; 0 is off", 0.0),
                "cutmix": Setting(NON_NEGATIVE, "α of CutMix's Beta distribution; 0 is off", 0.0),
                "prob": Setting(SHARE_ABOVE_0, "how often it mixes", 1.0),
                "switch_prob": Setting(
                    SHARE, "how often it is CutMix, where both are on", 0.5, needs={"mixup": (), "cutmix": ()}
                ),
                "mode": Setting(one_of("batch", "pair", "elem"), "what is drawn once for", "batch"),
            },
            switches=("mixup", "cutmix"),
        ),
        "dali": Block(
            "the ImageNet pipeline; train_dp, whose images are in memory, takes it and does nothing with it",
            {
                "gpu_aug": Setting(BOOL, "decode and augment on the GPU, where there is one", True),
                "mixup_alpha": Setting(NON_NEGATIVE, "α of Mixup; 0 is off"),
                "rand_augment": Block(
                    "RandAugment",
                    {
                        "n": Setting(OPERATIONS, "operations on an image", REQUIRED),
                        "m": Setting(MAGNITUDE, "their magnitude", REQUIRED),
                    },
                ),
                "max_bad": Setting(
                    NON_NEGATIVE_INT, "check all records first, and leave out up to so many damaged ones"
                ),
            },
            Each((OPTIONAL, {})),
            (DP, IMAGENET),
            idle={DP: "the images are in memory; Mixup is in the block mix, RandAugment in augment"},
        ),
    },
    "Fine-tuning": {
        "finetune": Block(
            "start from trained weights, and train all of the model or a part of it",
            {
                "weights": Setting(
                    TEXT, "a model of timm, a folder or file with safetensors, or a run or checkpoint of these scripts"
                ),
                "head": Setting(
                    one_of("new", "keep"), "start with a head of zeros, or with that of the weights", "new"
                ),
                "frozen_blocks": Setting(
                    NON_NEGATIVE_INT, "so many blocks, the first ones, stay as they are, and the embedding with them", 0
                ),
                "linear_probe": Setting(BOOL, "train the head only", False),
            },
        ),
    },
    "Model": {
        "MODEL": Setting(
            TEXT,
            "a Vision Transformer of timm",
            Each(("vit_base_patch16_224", "vit_base_patch16_224", REQUIRED)),
            TIMM,
        ),
        "IMG_SIZE": Setting(SIDE, "side of the images, in pixels", Each((224, REQUIRED, 224, 224))),
        "PATCH_SIZE": Setting(SIDE, "side of a patch, in pixels", Each((OPTIONAL, REQUIRED, OPTIONAL, OPTIONAL))),
        "HIDDEN_SIZE": Setting(whole(1, 2**16), "width", Each((OPTIONAL, REQUIRED, OPTIONAL, OPTIONAL))),
        "DEPTH": Setting(whole(1, 256), "transformer blocks", Each((OPTIONAL, REQUIRED, OPTIONAL, OPTIONAL))),
        "NUM_HEADS": Setting(whole(1, 2**16), "attention heads", Each((OPTIONAL, REQUIRED, OPTIONAL, OPTIONAL))),
        "MLP_RATIO": Setting(number(0.001, 100), "hidden units of an MLP ÷ HIDDEN_SIZE", 4, (HYBRID,)),
        "NUM_CLASSES": Setting(whole(1, 10**6), "classes", Each((10, 10, REQUIRED, REQUIRED))),
        "POOL": Setting(
            one_of("token", "avg"),
            "what the head sees: the class token, or the mean of the patches' tokens; that of MODEL",
            Each((OPTIONAL, "token", OPTIONAL, OPTIONAL)),
        ),
        "POSITIONS": Setting(
            one_of("learned", "sincos2d"), "position embedding: learned, or fixed sines and cosines", "learned", TIMM
        ),
        "LAYER_SCALE": Setting(
            POSITIVE, "what each branch is multiplied by at the start (LayerScale); that of MODEL", OPTIONAL, TIMM
        ),
        "DROP_RATE": Setting(FRACTION, "dropout", 0.0),
        "DROP_PATH_RATE": Setting(FRACTION, "stochastic depth of the last block; linear from 0", 0.0),
        "DROP_PATH_UNIFORM": Setting(
            BOOL, "every block has the rate of the last one", False, TIMM, needs={"DROP_PATH_RATE": ()}
        ),
        "CHECKPOINT": Setting(
            BOOL, "compute activations again in the backward pass instead of keeping them", False, (HYBRID,)
        ),
        "SEQ_LENGTH": Setting(POSITIVE_INT, "tokens; checked against the model", OPTIONAL, (HYBRID,)),
    },
    "Layout": {
        "parallel": Block(
            "processes = data × pipeline × tensor",
            {
                "pipeline": Setting(POSITIVE_INT, "pipeline stages", 1),
                "tensor": Block(
                    "tensor parallelism",
                    {
                        "mode": Setting(TENSOR_MODE, "how matrices are split", None),
                        "size": Setting(POSITIVE_INT, "ranks: q² in 2D, depth × q² in 2.5D, q³ in 3D", 1),
                        "depth": Setting(POSITIVE_INT, "of 2.5D; 1", needs={"mode": ("2.5d",)}),
                    },
                ),
            },
        ),
        "NUM_MICRO_BATCHES": Setting(
            POSITIVE_INT, "micro-batches that a pipeline makes of BATCH_SIZE images", OPTIONAL, (HYBRID,)
        ),
        "model": Block(
            "interleaved pipeline",
            {"num_chunks": Setting(POSITIVE_INT, "parts of the model on each stage", 1)},
            OPTIONAL,
            (HYBRID,),
        ),
        "TENSOR_SHAPE": Setting(
            SHAPE, "what a stage hands to the next, (micro-batch, tokens, width); checked", OPTIONAL, (HYBRID,)
        ),
        "TENSOR_PARALLEL_SIZE": Setting(POSITIVE_INT, "the tutorials' name for tensor.size", OPTIONAL, (HYBRID,)),
        "TENSOR_PARALLEL_MODE": Setting(TENSOR_MODE, "the tutorials' name for tensor.mode", OPTIONAL, (HYBRID,)),
        "NUM_CHUNKS": Setting(
            POSITIVE_INT,
            "the tutorials' name for model.num_chunks",
            OPTIONAL,
            (DP, HYBRID),
            idle={DP: "each process has the whole model"},
        ),
    },
    "Features": {
        "gradient_accumulation": Setting(POSITIVE_INT, "batches of BATCH_SIZE in an optimizer step", 1),
        "clip_grad_norm": Setting(NON_NEGATIVE, "largest norm of the gradient; 0 does not clip", 0.0),
        "fp16": Block(
            "mixed precision; None for fp32",
            {
                "mode": Setting(MODE, "what computes in half precision, see the README"),
                "dtype": Setting(one_of("fp16", "bf16"), "fp16 on CUDA, bf16 on a CPU", needs={"mode": ()}),
                "opt_level": Setting(one_of("O0", "O1", "O2", "O3"), "of APEX; O1", needs={"mode": (AMP_TYPE.APEX,)}),
                "initial_scale": Setting(POSITIVE, "loss scale to begin with, NAIVE; 2¹⁶", needs=NAIVE),
                "init_scale": Setting(
                    POSITIVE, "loss scale to begin with, TORCH; 2¹⁶", needs={**SCALED, "mode": (AMP_TYPE.TORCH,)}
                ),
                "growth_factor": Setting(number(1, 1e6), "of the loss scale; 2", needs=SCALED),
                "backoff_factor": Setting(number(1e-6, 1), "of the loss scale after an overflow; ½", needs=SCALED),
                "growth_interval": Setting(
                    POSITIVE_INT, "steps without overflow until it grows; 2000, NAIVE 1000", needs=SCALED
                ),
                "hysteresis": Setting(POSITIVE_INT, "overflows until it is lowered, NAIVE; 2", needs=NAIVE),
                "min_scale": Setting(POSITIVE, "smallest loss scale, NAIVE; 1", needs=NAIVE),
                "max_scale": Setting(POSITIVE, "largest loss scale, NAIVE; 2³²", needs=NAIVE),
            },
        ),
        "ema": Block(
            "an exponential moving average of the weights, evaluated beside them and kept in checkpoints",
            {
                "decay": Setting(FRACTION, "share of the average so far after an optimizer step", 0.9999),
                "warmup": Setting(BOOL, "let the decay grow to that, as 1 - step^(-2/3)", False),
            },
        ),
        "zero": Block(
            "optimizer state and fp32 weights split over the data-parallel ranks",
            {"stage": Setting(one_of(1, 2), "1: those; 2: also the gradients that are accumulated", REQUIRED)},
        ),
        "checkpoint": Block(
            "when to save; also after each epoch",
            {
                "every_steps": Setting(POSITIVE_INT, "optimizer steps from one checkpoint to the next"),
                "every_minutes": Setting(POSITIVE, "minutes from one checkpoint to the next", 30),
                "keep": Setting(POSITIVE_INT, "newest checkpoints to keep, beside the best one", 3),
            },
        ),
        "torch_ddp": Block(
            "arguments of DistributedDataParallel",
            {
                "bucket_cap_mb": Setting(number(0.001, 10**6), "MB of gradients that are reduced together; 25"),
                "static_graph": Setting(BOOL, "the same operations in every step"),
                "find_unused_parameters": Setting(BOOL, "some parameters have no gradient"),
            },
        ),
        "machine": MACHINE,
        "COMPILE": Setting(BOOL, "torch.compile", False),
        "TF32": Setting(BOOL, "TensorFloat-32 in matrix products and convolutions in fp32", False),
        "cudnn_benchmark": Setting(BOOL, "let cuDNN try its algorithms", False),
        "cudnn_deterministic": Setting(
            BOOL, "only deterministic algorithms in cuDNN and attention: slower, with more memory", False
        ),
    },
}
SCHEMA = {key: setting for group in GROUPS.values() for key, setting in group.items()}


def default(block: str, key: str) -> Any:
    """The default of a setting in a block."""
    return SCHEMA[block].settings[key].default


def defaults(script: str | None) -> dict[str, Any]:
    """The keys that a script of SCRIPTS has defaults for, with these; for None, those that all scripts share."""
    found = {key: default_for(setting, script) for key, setting in SCHEMA.items()}
    return {key: value for key, value in found.items() if value is not REQUIRED and value is not OPTIONAL}


def is_default(key: str, value: Any) -> bool:
    """Whether a value is the default of a key in some script."""
    setting = SCHEMA.get(key)
    return setting is not None and any(default_for(setting, script) == value for script in SCRIPTS)

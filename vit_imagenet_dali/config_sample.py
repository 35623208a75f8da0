"""A small ViT on the digits sample, in the manner of the 32K recipe: DALI, Mixup, LAMB, 32 micro-batches per step.

    torchrun --standalone --nproc_per_node 2 train.py --config ./config_sample.py

Processes: 2 for a global batch of 128, or any number. About 3 minutes on 2 CPU cores. Expected accuracy: at least 95 %
of the 360 test digits, see results/imagenet_sample, measured by scripts/imagenet_sample.sh.
"""

# ---- Training ----
BATCH_SIZE = 2  # images in a micro-batch of a rank
gradient_accumulation = 32  # global batch = 2 × 32 × 2 processes = 128
NUM_EPOCHS = 40
WARMUP_EPOCHS = 5
OPTIMIZER, SCHEDULE = "lamb", "linear"
LEARNING_RATE = 1.8e-2
WEIGHT_DECAY = 0.1
DECAY_VECTORS = False  # 440 steps are few for what starts from zero
LABEL_SMOOTHING = 0.0

# ---- Model: 0.5 M parameters ----
MODEL = "vit_tiny_patch16_224"
IMG_SIZE = 32
PATCH_SIZE = 4
HIDDEN_SIZE = 96
DEPTH = 4
NUM_HEADS = 4

# ---- Data ----
CROP_AREA = (0.7, 1.0)  # a small part of a digit is no digit
FLIP = False  # a mirrored digit is none either
EVAL_CROP = 224 / 256

# ---- Features ----
fp16 = None
clip_grad_norm = 1.0
mix = dict(mixup=0.2)
dali = dict(gpu_aug="auto")

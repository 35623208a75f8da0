"""ViT-B/16 (timm) on Caltech101: fp16 weights and activations, fp32 master weights.

    torchrun --standalone --nproc_per_node 4 train.py --config ./config/config_AMP_naive.py

Processes: any number, each a full replica. Hyper-parameters as published in Colossal-AI's tutorial, which states no
accuracy. Speed measured on an H200, see the README. For a small model on a CPU see the README.
"""

from colossalai.amp import AMP_TYPE

# ---- Training ----
BATCH_SIZE = 128  # images of a rank; global batch = 128 × processes: 512 on four
NUM_EPOCHS = 300
WARMUP_EPOCHS = 1
OPTIMIZER, SCHEDULE = "sgd", "linear"
MOMENTUM = 0.0
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 0.1
LABEL_SMOOTHING = 0.0

# ---- Model ----
MODEL = "vit_base_patch16_224"  # any Vision Transformer of timm
IMG_SIZE = 224
DROP_RATE = 0.1

# ---- Data ----
CROP_AREA = (0.08, 1.0)  # share of an image that a random crop is
FLIP = True

# ---- Features ----
fp16 = dict(mode=AMP_TYPE.NAIVE)
clip_grad_norm = 1.0

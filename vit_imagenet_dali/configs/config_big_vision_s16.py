"""ViT-S/16 on ImageNet-1K at 224 px in 90 epochs: no class token, fixed positions, AdamW, RandAugment, Mixup.

    torchrun --standalone --nproc_per_node 8 train.py --config ./configs/config_big_vision_s16.py

Processes: any number; on 8 GPUs as it is, on 4 with `--set gradient_accumulation=2`. Published accuracy: 76.5 % on the
validation set, 6 to 7 hours on a TPU v3-8; with `NUM_EPOCHS = 300` 80 %. Not measured here.

Source: L. Beyer et al., arXiv:2205.01580, and big_vision/configs/vit_s16_i1k.py in google-research/big_vision, with
optax.py, utils.py, models/vit.py and pp/archive/autoaugment.py. Its weight decay of 1e-4 is multiplied by the
schedule, but not by the learning rate of 1e-3: that is AdamW's 0.1. Its 10,000 steps of warm-up are 8 epochs. The
magnitude 10 of its RandAugment is the largest, here 30. Different here: a linear head, there a hidden layer and tanh
before it; all training images, there 99 %; ImageNet's mean and standard deviation, there 0.5; crops are resized with
antialiasing; weights start as timm's do; RandAugment is DALI's, of 14 operations, there 16: without identity, with
Invert, Cutout and SolarizeAdd, and changes of colour, contrast, brightness and sharpness only upwards; an image is
mixed with its neighbour in the batch, there with the one before it.
"""

from colossalai.amp import AMP_TYPE

# ---- Training ----
BATCH_SIZE = 128  # images in a micro-batch of a rank
gradient_accumulation = 1
GLOBAL_BATCH = 1_024  # 128 × 8 GPUs
NUM_EPOCHS = 90
WARMUP_EPOCHS = 8
OPTIMIZER, SCHEDULE = "adamw", "cosine"
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
DECAY_VECTORS = False
LABEL_SMOOTHING = 0.0

# ---- Model ----
MODEL = "vit_base_patch16_gap_224"  # global average pooling, no class token; in the size S
IMG_SIZE = 224
HIDDEN_SIZE = 384
NUM_HEADS = 6
POSITIONS = "sincos2d"
NUM_CLASSES = 1000

# ---- Data ----
CROP_AREA = (0.05, 1.0)
FLIP = True
EVAL_CROP = 224 / 256

# ---- Features ----
fp16 = dict(mode=AMP_TYPE.TORCH, dtype="bf16")
clip_grad_norm = 1.0
mix = dict(mixup=0.2)
augment = dict(policy="rand", n=2, m=30)

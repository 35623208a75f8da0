"""ViT-L/32 on ImageNet-1K with a global batch of 32K: LAMB, 150 of 300 epochs of warm-up, fp16, Mixup.

    torchrun --standalone --nproc_per_node 4 train.py --config ./config_vit_l32.py

Processes: any number; the published run had 4 A100s and took 37.83 h. On another number
keep the global batch: `--dry-run` says how. Expected accuracy: the tutorial shows its curve in a picture only.
Not measured on GPUs here yet; by a dry run it takes 27 GB of one. `config_sample.py` runs in minutes on a CPU.
"""

from colossalai.amp import AMP_TYPE

# ---- Training ----
BATCH_SIZE = 512  # images in a micro-batch of a rank; published: 256 × 32 × 4 GPUs, the same curve
gradient_accumulation = 16
GLOBAL_BATCH = 32_768  # 512 × 16 × 4 GPUs
NUM_EPOCHS = 300
WARMUP_EPOCHS = 150  # the schedule moves every optimizer step; an epoch is 39 of them
OPTIMIZER, SCHEDULE = "lamb", "linear"
LEARNING_RATE = 1.8e-2
WEIGHT_DECAY = 0.1
LABEL_SMOOTHING = 0.0

# ---- Model ----
MODEL = "vit_large_patch32_224"  # any Vision Transformer of timm
IMG_SIZE = 224
DROP_RATE = 0.1

# ---- Data ----
CROP_AREA = (0.08, 1.0)  # share of an image that a random crop is
FLIP = True
EVAL_CROP = 224 / 256  # side of the centre that is evaluated ÷ image's shorter side

# ---- Features ----
fp16 = dict(mode=AMP_TYPE.TORCH, half_residual=True)
clip_grad_norm = 1.0
mix = dict(mixup=0.2)
dali = dict(gpu_aug="auto")  # decode and augment on the GPU, unless a rank has 6 CPU cores

"""ViT-B/16 (timm) on CIFAR-10, data parallel, LAMB with a large batch.

    torchrun --standalone --nproc_per_node 4 train_dp.py --config ./configs/config_data_parallel.py

Processes: any number, each a full replica. Hyper-parameters as published in Colossal-AI's tutorial, which states no
accuracy. Not measured on GPUs here yet. The digits sample is smaller than one global batch of this config: there add
`--set BATCH_SIZE=64 --set gradient_accumulation=1`.
"""

from colossalai.amp import AMP_TYPE

# ---- Training ----
BATCH_SIZE = 256  # images in a micro-batch of a rank
gradient_accumulation = 16  # global batch = 256 × 16 × processes: 4,096 on one, 16,384 on four
NUM_EPOCHS = 300
WARMUP_EPOCHS = 50
OPTIMIZER, SCHEDULE = "lamb", "linear"
LEARNING_RATE = 1.8e-2
WEIGHT_DECAY = 0.1
LABEL_SMOOTHING = 0.0

# ---- Model ----
MODEL = "vit_base_patch16_224"  # any Vision Transformer of timm
IMG_SIZE = 224
DROP_RATE = 0.1

# ---- Data ----
CROP_PADDING = 4  # a crop is shifted by up to so many of an image's 32 pixels
FLIP = True

# ---- Features ----
fp16 = dict(mode=AMP_TYPE.TORCH)
clip_grad_norm = 1.0

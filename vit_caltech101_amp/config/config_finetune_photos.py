"""ViT-S/14 (timm) on a few photographs, fine-tuned from weights of DINOv2, on a CPU and without the Hugging Face Hub.

    python ../scripts/sample_data.py tuxpaint ../data/tuxpaint
    python ../scripts/sample_data.py dinov2 ../data/dinov2
    DATA=../data/tuxpaint torchrun --standalone --nproc_per_node 1 train.py --config ./config/config_finetune_photos.py

Processes: one; with more, LEARNING_RATE times their number. Expected accuracy on Tux Paint's 263 pictures in 14
classes: 75.5 % ± 6.0 % were measured over five seeds (results/finetune_photos), and 49.8 % from scratch.

Another task has changed the last block of these weights. So the last three blocks are trained, and the others stay.
"""

from colossalai.amp import AMP_TYPE

# ---- Training ----
BATCH_SIZE = 16  # images of a rank; an epoch is 13 steps on 210 images
NUM_EPOCHS = 15
WARMUP_EPOCHS = 1
OPTIMIZER, SCHEDULE = "adamw", "cosine"
LEARNING_RATE = 5e-4
LAYER_DECAY = 0.75
WEIGHT_DECAY = 0.05
LABEL_SMOOTHING = 0.1

# ---- Model ----
MODEL = "vit_small_patch14_dinov2"
IMG_SIZE = 168  # 12 × 12 patches; the weights have seen 37 × 37
DROP_RATE = 0.0
finetune = dict(weights="../data/dinov2", frozen_blocks=9)

# ---- Data ----
CROP_AREA = (0.5, 1.0)  # share of an image that a random crop is
FLIP = True

# ---- Features ----
fp16 = dict(mode=AMP_TYPE.TORCH, dtype="bf16")
clip_grad_norm = 1.0

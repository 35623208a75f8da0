"""ViT-B/16 (timm) on your own images, fine-tuned from weights of ImageNet-21k.

    DATA=folder torchrun --standalone --nproc_per_node 1 train.py --config ./config/config_finetune.py

Processes: one; with more, LEARNING_RATE times their number. Not measured here yet, neither minutes nor accuracy. For a
small model on a CPU set `finetune` to a run or a folder with weights, and MODEL or its sizes to theirs.

Source: A. Dosovitskiy et al., arXiv:2010.11929, appendix B.1.1: SGD with momentum 0.9, a cosine, no weight decay,
gradients clipped at norm 1, a head of zeros, and 500 steps of 512 images for small data sets, at a rate of 1e-3 to
3e-2. The weights: A. Steiner et al., arXiv:2106.10270. Different here: batches of 128 images, at a quarter of the rate
1e-2 (linear scaling: P. Goyal et al., arXiv:1706.02677); epochs instead of steps; the average of the weights; 224
pixels, there 384.
"""

from colossalai.amp import AMP_TYPE

# ---- Training ----
BATCH_SIZE = 128  # images of a rank; must not be more than there are for training
NUM_EPOCHS = 30
WARMUP_EPOCHS = 1
OPTIMIZER, SCHEDULE = "sgd", "cosine"
MOMENTUM = 0.9
LEARNING_RATE = 2.5e-3  # 1e-2 × 128 ÷ 512
WEIGHT_DECAY = 0.0
LABEL_SMOOTHING = 0.0

# ---- Model ----
MODEL = "vit_base_patch16_224"
IMG_SIZE = 224
DROP_RATE = 0.0
finetune = dict(weights="vit_base_patch16_224.augreg_in21k")

# ---- Data ----
CROP_AREA = (0.5, 1.0)  # share of an image that a random crop is
FLIP = True

# ---- Features ----
fp16 = dict(mode=AMP_TYPE.TORCH, dtype="bf16")
clip_grad_norm = 1.0
ema = dict(decay=0.999, warmup=True)  # without the warm-up it would hold the first weights for thousands of steps

"""DeiT III ViT-S/16 on ImageNet-1K at 224 px: 800 epochs with LAMB, 3-Augment, repeated augmentation, BCE.

    torchrun --standalone --nproc_per_node 8 train.py --config ./configs/config_deit3_s16.py

Processes: any number; on 8 GPUs as it is, on 4 with `--set gradient_accumulation=2`. Published accuracy: 81.4 % on the
validation set, on 8 GPUs, no hours stated; 24.8 % after 20 epochs, 61.0 % after 80, 74.4 % after 400. Not measured
here.

Source: H. Touvron et al., arXiv:2204.07118, and the first command of README_revenge.md in facebookresearch/deit, with
main.py, augment.py, samplers.py and models_v2.py. Different here: crops are resized bilinearly, there bicubically; the
learning rate moves every step and starts near 0, there every epoch and at 1e-6; LAMB has no bias correction, and an
epsilon of 1e-6, there 1e-8; the copies of an image are in the batch of one GPU, there of three; an image is mixed with
its neighbour in the batch, there with the one at the other end.
"""

from colossalai.amp import AMP_TYPE

# ---- Training ----
BATCH_SIZE = 256  # images in a micro-batch of a rank
gradient_accumulation = 1
GLOBAL_BATCH = 2_048  # 256 × 8 GPUs
NUM_EPOCHS = 800
WARMUP_EPOCHS = 5
OPTIMIZER, SCHEDULE = "lamb", "cosine"
LEARNING_RATE = 4e-3
MIN_LEARNING_RATE = 1e-5
WEIGHT_DECAY = 0.05
DECAY_VECTORS = False
LABEL_SMOOTHING = 0.0

# ---- Model ----
MODEL = "deit3_small_patch16_224"
IMG_SIZE = 224
LAYER_SCALE = 1e-4
DROP_PATH_RATE = 0.05
DROP_PATH_UNIFORM = True
NUM_CLASSES = 1000

# ---- Data ----
CROP_AREA = (0.08, 1.0)
FLIP = True
REPEATS = 3
EVAL_CROP = 1.0

# ---- Features ----
fp16 = dict(mode=AMP_TYPE.TORCH)
clip_grad_norm = 1.0  # the default of apex's FusedLAMB
bce = dict(threshold=0.0)
mix = dict(mixup=0.8, cutmix=1.0)
augment = dict(policy="three", color_jitter=0.3)

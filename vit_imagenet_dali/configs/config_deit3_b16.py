"""DeiT III ViT-B/16 on ImageNet-1K at 192 px: 800 epochs, then `config_deit3_b16_finetune.py` at 224 px.

    torchrun --standalone --nproc_per_node 8 train.py --output ../runs/deit3_b16 --config ./configs/config_deit3_b16.py

Processes: any number; on 8 GPUs as it is, on 4 with `--set gradient_accumulation=2`. Published accuracy: 82.8 % at 192
px, and 83.8 % after the fine-tuning, on 8 GPUs, no hours stated; 25.6 % after 20 epochs, 65.2 % after 80, 78.0 % after
400. Not measured here.

Source: H. Touvron et al., arXiv:2204.07118, and the second command of README_revenge.md in facebookresearch/deit, with
main.py, augment.py, samplers.py and models_v2.py. Different here: as in `config_deit3_s16.py`.
"""

from colossalai.amp import AMP_TYPE

# ---- Training ----
BATCH_SIZE = 256  # images in a micro-batch of a rank
gradient_accumulation = 1
GLOBAL_BATCH = 2_048  # 256 × 8 GPUs
NUM_EPOCHS = 800
WARMUP_EPOCHS = 5
OPTIMIZER, SCHEDULE = "lamb", "cosine"
LEARNING_RATE = 3e-3
MIN_LEARNING_RATE = 1e-5
WEIGHT_DECAY = 0.05
DECAY_VECTORS = False
LABEL_SMOOTHING = 0.0

# ---- Model ----
MODEL = "deit3_base_patch16_224"
IMG_SIZE = 192
LAYER_SCALE = 1e-4
DROP_PATH_RATE = 0.2
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

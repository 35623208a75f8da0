"""DeiT III ViT-B/16 on ImageNet-1K: the 20 epochs at 224 px that follow 800 at 192 px (`config_deit3_b16.py`).

    torchrun --standalone --nproc_per_node 8 train.py --config ./configs/config_deit3_b16_finetune.py

Processes: any number; on 8 GPUs as it is, on 4 with `--set gradient_accumulation=2`. `finetune.weights` is the run
before this one. Published accuracy: 83.8 % on the validation set, on 8 GPUs, no hours stated. Not measured here.

Source: H. Touvron et al., arXiv:2204.07118, and the first command under "finetuning" of README_revenge.md in
facebookresearch/deit, with main.py. The rate stays at 1e-5 after the warm-up, since main.py's lowest rate is the same.
Different here: crops are resized bilinearly, there bicubically; the warm-up moves every step, there every epoch;
RandAugment is DALI's, one operation an image, there timm's rand-m9-mstd0.5-inc1: two, each every other time, and of 15
operations; 27 of 30 is 9 of timm's 10.
"""

from colossalai.amp import AMP_TYPE

# ---- Training ----
BATCH_SIZE = 64  # images in a micro-batch of a rank
gradient_accumulation = 1
GLOBAL_BATCH = 512  # 64 × 8 GPUs
NUM_EPOCHS = 20
WARMUP_EPOCHS = 5
OPTIMIZER, SCHEDULE = "adamw", "cosine"
LEARNING_RATE = 1e-5
MIN_LEARNING_RATE = 1e-5
WEIGHT_DECAY = 0.1
DECAY_VECTORS = False
LABEL_SMOOTHING = 0.1

# ---- Model ----
MODEL = "deit3_base_patch16_224"
IMG_SIZE = 224
LAYER_SCALE = 1e-4
DROP_PATH_RATE = 0.2
DROP_PATH_UNIFORM = True
NUM_CLASSES = 1000
finetune = dict(weights="../runs/deit3_b16", head="keep")

# ---- Data ----
CROP_AREA = (0.08, 1.0)
FLIP = True
EVAL_CROP = 1.0

# ---- Features ----
fp16 = dict(mode=AMP_TYPE.TORCH)
mix = dict(mixup=0.8, cutmix=1.0)
augment = dict(policy="rand", n=1, m=27)

"""MAE's fine-tuning of ViT-B/16 on ImageNet-1K at 224 px: 100 epochs with layer-wise learning rates.

    torchrun --standalone --nproc_per_node 8 train.py --config ./configs/config_mae_b16_finetune.py

Processes: any number; on 8 GPUs as it is, on 4 with `--set gradient_accumulation=2`. The weights, of 1,600 epochs,
come from the Hugging Face Hub; without a network set `finetune.weights` to their file. Published accuracy: 83.57 ±
0.08 % on the validation set in four runs, 7 h 11 min on 32 V100s. Not measured here.

Source: K. He et al., arXiv:2111.06377, and FINETUNE.md in facebookresearch/mae, with main_finetune.py,
util/lr_decay.py and util/datasets.py: learning rate 5e-4 × 1,024 ÷ 256. Different here: the head starts as zeros,
there with a deviation of 2e-5; crops are resized bilinearly, there bicubically; RandAugment is DALI's, one operation
an image, there timm's rand-m9-mstd0.5-inc1: two, each every other time, and of 15 operations; 27 of 30 is 9 of timm's
10.
"""

from colossalai.amp import AMP_TYPE

# ---- Training ----
BATCH_SIZE = 128  # images in a micro-batch of a rank
gradient_accumulation = 1
GLOBAL_BATCH = 1_024  # 128 × 8 GPUs
NUM_EPOCHS = 100
WARMUP_EPOCHS = 5
OPTIMIZER, SCHEDULE = "adamw", "cosine"
LEARNING_RATE = 2e-3
MIN_LEARNING_RATE = 1e-6
WEIGHT_DECAY = 0.05
DECAY_VECTORS = False
LAYER_DECAY = 0.65
LABEL_SMOOTHING = 0.1

# ---- Model ----
MODEL = "vit_base_patch16_224"
IMG_SIZE = 224
POOL = "avg"
DROP_PATH_RATE = 0.1
NUM_CLASSES = 1000
finetune = dict(weights="vit_base_patch16_224.mae", head="new")

# ---- Data ----
CROP_AREA = (0.08, 1.0)
FLIP = True
EVAL_CROP = 224 / 256

# ---- Features ----
fp16 = dict(mode=AMP_TYPE.TORCH)
mix = dict(mixup=0.8, cutmix=1.0)
augment = dict(policy="rand", n=1, m=27, erase=0.25)

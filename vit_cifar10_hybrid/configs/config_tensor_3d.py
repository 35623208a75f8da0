"""ViT-B/16 on CIFAR-10, 3D tensor parallel over a cube of ranks (Z. Bian et al., arXiv:2105.14450).

    torchrun --standalone --nproc_per_node 8 train_hybrid.py --config ./configs/config_tensor_3d.py

Processes: a multiple of 8. parallel.tensor.size is a cube q³, and 8 is the smallest: 4 GPUs cannot run it. The batch
is split by q², heads and hidden size by q. BATCH_SIZE and HIDDEN_SIZE are multiples of q², NUM_HEADS of q. The 197
tokens stay whole, and may be odd.

Hyper-parameters as published in Colossal-AI's tutorial, which states no accuracy. Not measured on GPUs here yet. On a
CPU this model is too large; take a small one with `--set`, as `scripts/quickstart.sh` does.
"""

from colossalai.amp import AMP_TYPE

# ---- Training ----
BATCH_SIZE = 256  # images of a data-parallel rank; global batch = 256 × data parallel size
OPTIMIZER, SCHEDULE = "adamw", "cosine"
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.3
NUM_EPOCHS = 300
WARMUP_EPOCHS = 32
LABEL_SMOOTHING = 0.1

# ---- Model: ViT-B/16 ----
IMG_SIZE = 224
PATCH_SIZE = 16
HIDDEN_SIZE = 768
DEPTH = 12
NUM_HEADS = 12
MLP_RATIO = 4
CHECKPOINT = False  # True, as published, computes activations again in the backward pass instead of keeping them
SEQ_LENGTH = (IMG_SIZE // PATCH_SIZE) ** 2 + 1  # one token a patch, and the class token

# ---- Data ----
CROP_PADDING = 4  # a crop is shifted by up to so many of an image's 32 pixels
FLIP = True

# ---- Layout: processes = data × pipeline × tensor ----
TENSOR_PARALLEL_SIZE = 8
TENSOR_PARALLEL_MODE = "3d"
parallel = dict(
    pipeline=1,
    tensor=dict(mode=TENSOR_PARALLEL_MODE, size=TENSOR_PARALLEL_SIZE),
)

# ---- Features ----
fp16 = dict(mode=AMP_TYPE.NAIVE)
clip_grad_norm = 1.0

"""ViT-B/16 on CIFAR-10, 2.5D tensor parallel (B. Wang et al., arXiv:2105.14500).

    torchrun --standalone --nproc_per_node 4 train_hybrid.py --config ./configs/config_tensor_2p5d.py

Processes: a multiple of 4. parallel.tensor.size is depth × q²: `depth` copies of a 2D square. With depth 1, which is
all that 4 processes allow, it is 2D; depth 2 needs 8. BATCH_SIZE and NUM_HEADS are multiples of q, HIDDEN_SIZE of q².
The 197 tokens stay whole, and may be odd.

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
TENSOR_PARALLEL_SIZE = 4
TENSOR_PARALLEL_MODE = "2.5d"
parallel = dict(
    pipeline=1,
    tensor=dict(mode=TENSOR_PARALLEL_MODE, size=TENSOR_PARALLEL_SIZE, depth=1),
)

# ---- Features ----
fp16 = dict(mode=AMP_TYPE.NAIVE)
clip_grad_norm = 1.0

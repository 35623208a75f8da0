"""ViT-B/16 on CIFAR-10, hybrid parallel: two pipeline stages, each split over two 1D tensor-parallel ranks.

    torchrun --standalone --nproc_per_node 4 train_hybrid.py --config ./configs/config_hybrid_parallel.py

Processes: a multiple of 4; 8 train two replicas. Hyper-parameters as published in Colossal-AI's tutorial, which
states no accuracy. Not measured on GPUs here yet. On a CPU this model is too large; take a small one with `--set`, as
`scripts/quickstart.sh` does.
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
TENSOR_PARALLEL_SIZE = 2
TENSOR_PARALLEL_MODE = "1d"
parallel = dict(
    pipeline=2,
    tensor=dict(mode=TENSOR_PARALLEL_MODE, size=TENSOR_PARALLEL_SIZE),
)
NUM_MICRO_BATCHES = 2 * parallel["pipeline"]  # published: one per stage; more shrink the bubble but launch more
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES, SEQ_LENGTH, HIDDEN_SIZE)  # what one stage hands to the next

# ---- Features ----
fp16 = dict(mode=AMP_TYPE.NAIVE)  # the only mixed precision that works with a pipeline
clip_grad_norm = 1.0

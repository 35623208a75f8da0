"""ViT-B/16 on CIFAR-10, interleaved pipeline: two stages of two chunks each (D. Narayanan et al., arXiv:2104.04473).

    torchrun --standalone --nproc_per_node 2 train_hybrid.py --config ./configs/config_pipeline_interleaved.py

Processes: a multiple of 2, one stage each. Each stage has every other quarter of the model, which halves the time
that stages wait for each other, and doubles what they send.

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
TENSOR_PARALLEL_SIZE = 1
TENSOR_PARALLEL_MODE = None
parallel = dict(
    pipeline=2,
    tensor=dict(mode=TENSOR_PARALLEL_MODE, size=TENSOR_PARALLEL_SIZE),
)
model = dict(num_chunks=2)  # rank 0 has the 1st and the 3rd quarter of the blocks, rank 1 the 2nd and the 4th
NUM_MICRO_BATCHES = 2 * parallel["pipeline"]  # a multiple of the stages
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES, SEQ_LENGTH, HIDDEN_SIZE)  # what one stage hands to the next

# ---- Features ----
fp16 = dict(mode=AMP_TYPE.NAIVE)  # the only mixed precision that works with a pipeline
clip_grad_norm = 1.0

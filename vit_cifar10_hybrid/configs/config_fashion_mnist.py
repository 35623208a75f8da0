"""A small ViT on Fashion-MNIST, which trains in minutes on a CPU: 60,000 images of 28 × 28 grey pixels, 10 classes.

    torchrun --standalone --nproc_per_node 1 train_hybrid.py --config ./configs/config_fashion_mnist.py

Processes: any number; `--set parallel.pipeline=2` and so on for other layouts. DATA is what `scripts/sample_data.py
fashion-mnist` has written. Expected accuracy: 87.7 % ± 0.3 %, with 5 seeds, in 24 to 123 minutes each on a busy CPU;
measured by scripts/train_fashion_mnist.py, in results/fashion_mnist.
"""

# ---- Training ----
BATCH_SIZE = 128  # images of a data-parallel rank; global batch = 128 × data parallel size
OPTIMIZER, SCHEDULE = "adamw", "cosine"
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.05
NUM_EPOCHS = 10
WARMUP_EPOCHS = 1
LABEL_SMOOTHING = 0.1

# ---- Model ----
IMG_SIZE = 28
PATCH_SIZE = 7
HIDDEN_SIZE = 64
DEPTH = 4
NUM_HEADS = 4
MLP_RATIO = 4
NUM_CLASSES = 10

# ---- Data: stored with a black border of 2 pixels ----
CROP_PADDING = 2
FLIP = True

# ---- Layout: processes = data × pipeline × tensor ----
parallel = dict(pipeline=1, tensor=dict(mode=None, size=1))
NUM_MICRO_BATCHES = 4  # of a pipeline

# ---- Features ----
fp16 = None
clip_grad_norm = 1.0

#!/usr/bin/env bash
# From a fresh clone to a trained Vision Transformer: set up, make the sample data, train on 2 processes, evaluate.
#
#   bash scripts/quickstart.sh [extra flags of train_hybrid.py]
#
# Two pipeline stages, the shipped pipeline config, a small model: 1 to 2 minutes on 2 CPU cores after installation.
# Uses GPUs if this machine has any that the installed torch can use, a single one without the pipeline.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

unset DATA # the sample, not the user's CIFAR-10
python scripts/sample_data.py

mkdir -p "$root/runs"
output="$root/runs/quickstart"
number=1
until mkdir "$output-$number" 2> /dev/null; do # another one may be looking for a name too
    [ -e "$output-$number" ] || mkdir "$output-$number" # which says why it cannot be made
    number=$((number + 1))
done
output="$output-$number"
trap 'rmdir "$output" 2> /dev/null || true' EXIT # it is empty if the command is refused

processes=2
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" = 1 ]; then processes=1; fi # a GPU holds one stage
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

cd vit_cifar10_hybrid
python -m colossal_vit.launch.torchrun --standalone --nproc_per_node "$processes" \
    train_hybrid.py --config ./configs/config_pipeline_parallel.py --output "$output" \
    --set IMG_SIZE=32 --set PATCH_SIZE=8 --set HIDDEN_SIZE=64 --set DEPTH=4 --set NUM_HEADS=4 --set CHECKPOINT=False \
    --set BATCH_SIZE=128 --set NUM_EPOCHS=60 --set WARMUP_EPOCHS=3 --set LEARNING_RATE=3e-3 --set WEIGHT_DECAY=0.05 \
    --set FLIP=False --set CROP_PADDING=2 --set fp16=None --set parallel.pipeline="$processes" --set NUM_MICRO_BATCHES=4 "$@"

if [ ! -e "$output/metrics.jsonl" ]; then exit; fi # --dry-run trains nothing

python - "$output" << 'PYTHON'
import sys
from pathlib import Path

from colossal_vit.results import read_metrics

output = Path(sys.argv[1])
last = read_metrics(output)[1][-1]
print(f"""
Test accuracy: {last["eval_accuracy"]:.2%} of {last["eval_images"]} images that were never trained on
Run directory: {output} (metrics.jsonl, loss.png, accuracy.png, config.json)
Next:          cd vit_cifar10_hybrid, and see its README for 4 processes and the real CIFAR-10
""")
PYTHON

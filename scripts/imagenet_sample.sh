#!/usr/bin/env bash
# The ImageNet example from raw folders to an accuracy, on the digits sample: pack, verify, train on 2 processes.
#
#   bash scripts/imagenet_sample.sh [RESULT]
#
# The config is vit_imagenet_dali/config_sample.py: DALI, Mixup, LAMB, 32 micro-batches a step. About 4 minutes on 2 CPU
# cores after installation. With RESULT, a folder, the run is kept there, with its log and provenance.
set -euo pipefail
result=${1:+$(realpath -m "$1")}
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

(
    cd vit_imagenet_dali
    python ../scripts/sample_data.py "$scratch" --imagenet
    python build_tfrecords.py "$scratch/imagenet" "$scratch/tfrecords"
    python build_tfrecords.py --verify "$scratch/tfrecords" --check decode
    DATA="$scratch/tfrecords" torchrun --standalone --nproc_per_node 2 train.py --config ./config_sample.py \
        --output "$scratch/run"
) 2>&1 | sed -u "s#$scratch#SCRATCH#g" | tee "$scratch/log.txt"

if [ -n "$result" ]; then
    python -m colossal_vit.provenance "$scratch/run" "$result" --log "$scratch/log.txt" \
        --command "bash scripts/imagenet_sample.sh ${result#"$root"/}"
fi

#!/usr/bin/env bash
# Train under SLURM, one task a GPU:
#
#   srun --nodes 1 --ntasks 4 --gpus-per-node 4 bash ./scripts/train_slurm.sh [CONFIG] [flags of train.py]
#
# HOST=<name of the first node> in front says where the ranks meet; without it, that is the first node of the job.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
config=./config/config_AMP_torch.py
if [ $# -gt 0 ] && [[ $1 != -* ]]; then
    config=$1
    shift
fi
exec python train.py --launcher slurm --config "$config" "$@"

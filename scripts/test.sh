#!/usr/bin/env bash
# Set up and run the whole test suite; with arguments, pytest with these.
#
#   bash scripts/test.sh                        # everything, as CI does
#   bash scripts/test.sh --fast                 # the inner loop: a test or two of each part
#   bash scripts/test.sh [-k layouts] [-x] ...  # what pytest makes of its arguments
#   bash scripts/test.sh --cu12 [...]           # any of these under the CUDA 12 set, in .venv-cu12
set -euo pipefail
if [ "${1:-}" = --cu12 ]; then
    shift
    VIT_VENV=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv-cu12
    export VIT_VENV VIT_CUDA_SET=12 # also for the scripts that tests start
fi
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
ruff check .
ruff format --check .
lint-imports --no-logo
if [ "${1:-}" = --fast ]; then
    set -- "${@:2}" tests/test_{config,criterion,data,mfu,patches,run_directory,signatures}.py \
        vit_cifar10_hybrid/tests/test_cifar10.py vit_imagenet_dali/tests/test_mixup.py \
        "tests/test_layouts.py::test_every_layout_has_the_curve_of_one_process["{"DP 2","PP 2","1D 2"}"]" \
        tests/test_devices.py::test_setup_knows_for_which_gpus_torch_has_kernels \
        "tests/test_zero.py::test_two_replicas_make_the_bits_of_ddp[fp32, AdamW]" \
        tests/test_dry_run.py::test_a_report_is_of_any_world_size \
        "vit_cifar10_hybrid/tests/test_vit.py::test_vit_of_any_layout_equals_timms["{"1D 2","2D 4"}"]" \
        "tests/test_resume.py::test_stopped_and_resumed_runs_record_the_same_bits[hybrid, 1 process]" \
        tests/test_launch.py::test_{a_rendezvous_is_read_from_flags_and_environment,ranks_started_by_hand_train} \
        tests/test_launch.py::test_a_bug_on_one_rank_ends_the_others \
        tests/test_checkpoint.py::test_one_flipped_bit_is_found
fi
if [ $# -gt 0 ]; then exec python -m pytest "$@"; fi

# At least two processes: real launchers are waited for more than they work. More than eight do not help, since a file's
# tests stay together, for what they share; and each process has everything in memory.
workers=$(nproc)
workers=$((workers < 2 ? 2 : workers > 8 ? 8 : workers))
exec python -m pytest -n $workers --dist loadfile

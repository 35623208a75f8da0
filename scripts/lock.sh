#!/usr/bin/env bash
# Refresh uv.lock to the newest versions that pyproject.toml allows, and the requirements files from it.
#
#   bash scripts/lock.sh [--check]      # --check: change nothing, fail if the requirements are not what the lock says
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export_requirements() { # CUDA version, name of the file
    cat << TEXT
# For CUDA $1. Exported from uv.lock by scripts/lock.sh; do not edit. Install from the root of the repository with
#   pip install --no-deps -r $2
# --no-deps, because Colossal-AI's metadata asks for versions and packages that it does not need here (pyproject.toml).
# The tutorials' nvidia-dali-cuda110 is not on PyPI (a stub there points to NVIDIA's own index).
TEXT
    uv export --frozen --no-hashes --no-default-groups --group "cuda$1" --no-header --no-annotate --quiet
}
if [ "${1:-}" = --check ]; then
    diff requirements.txt <(export_requirements 13 requirements.txt)
    diff requirements-cu12.txt <(export_requirements 12 requirements-cu12.txt)
else
    uv lock --upgrade
    export_requirements 13 requirements.txt > requirements.txt
    export_requirements 12 requirements-cu12.txt > requirements-cu12.txt
fi

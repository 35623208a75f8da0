#!/usr/bin/env bash
# Refresh uv.lock to the newest versions that pyproject.toml allows, and requirements.txt from it.
#
#   bash scripts/lock.sh [--check]      # --check: change nothing, fail if requirements.txt is not what the lock says
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export_requirements() {
    cat << 'TEXT'
# Exported from uv.lock by scripts/lock.sh; do not edit. Install from the root of the repository with
#   pip install --no-deps -r requirements.txt
# --no-deps, because Colossal-AI's metadata asks for versions and packages that it does not need here (pyproject.toml).
# The tutorials' nvidia-dali-cuda110 is not on PyPI (a stub there points to NVIDIA's own index); nvidia-dali-cuda130 is.
# For CUDA 12 drivers: requirements-cu12.txt.
TEXT
    uv export --frozen --no-hashes --no-group dev --no-header --no-annotate --quiet
}
if [ "${1:-}" = --check ]; then
    export_requirements | diff requirements.txt -
else
    uv lock --upgrade
    export_requirements > requirements.txt
fi

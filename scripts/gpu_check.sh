#!/usr/bin/env bash
# Install, then check everything that only a GPU can show: `bash scripts/gpu_check.sh --help`.
#
# On a machine that cannot download: --no-setup takes the python on PATH and what it has.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "${1:-}" = --no-setup ]; then shift; else source scripts/setup.sh; fi
exec python scripts/gpu_check.py "$@"

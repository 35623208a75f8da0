#!/usr/bin/env bash
# Set up and run the whole test suite; arguments go to pytest.
#
#   bash scripts/test.sh [-k layouts] [-x] ...
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
ruff check .
ruff format --check .
python -m pytest "$@"

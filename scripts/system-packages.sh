#!/bin/sh
# Check that this machine has the packages that pip cannot install, and install them where that is allowed.
# usage: system-packages.sh PYTHON
set -eu

python=${1:-python3}
missing=""

has_library() {
    (PATH="$PATH:/usr/sbin:/sbin" && ldconfig -p 2>/dev/null) | grep -q "$1 "
}

if ! command -v "$python" >/dev/null; then
    missing="$missing python3 python3-venv"
elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    missing="$missing python3-venv"
fi

# Libraries that Mooncake's wheel links to but does not bundle.
has_library libibverbs.so.1 || missing="$missing libibverbs1"
has_library libnuma.so.1 || missing="$missing libnuma1"
has_library libcurl.so.4 || missing="$missing libcurl4"

# Tools of the tests on two hosts, which are skipped where the tools cannot be installed.
wanted=""
(PATH="$PATH:/usr/sbin:/sbin" && command -v ip && command -v tc && command -v ss) >/dev/null || wanted="$wanted iproute2"
(command -v unshare && command -v nsenter) >/dev/null || wanted="$wanted util-linux"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    missing="$missing$wanted"
fi

if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        log=$(mktemp)
        # shellcheck disable=SC2086 # a list of words
        if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $missing; } >"$log" 2>&1; then
            cat "$log" >&2
            exit 1
        fi
        rm "$log"
    else
        echo "kvflow needs these system packages:$missing" >&2
        echo "install them, for example with: sudo apt-get install$missing" >&2
        exit 1
    fi
fi

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "kvflow needs Python 3.11 or newer; $("$python" --version) found. Try: make PYTHON=python3.12" >&2
    exit 1
fi

#!/bin/sh
# Run the tests that start real vLLM servers on CPUs, in a separate environment; see docs/vllm.md.
# usage: test-vllm.sh ENVIRONMENT [arguments of pytest]
set -eu

environment=$1
shift

# Create an environment from a frozen list of packages, unless it exists.
# usage: install PLACE LIST
install() {
    if ! cmp -s "$2" "$1/installed.txt"; then
        "${PYTHON:-python3}" -m venv "$1"
        "$1/bin/pip" install --quiet --disable-pip-version-check --no-deps --requirement "$2"
        cp "$2" "$1/installed.txt"
    fi
}

install "$environment" scripts/vllm-requirements.txt
for router in vllm-router smg; do
    install ".cache/routers/$router" "scripts/$router-requirements.txt"
done
"$environment/bin/pip" install --quiet --disable-pip-version-check --no-deps --editable .
# The newest version needs a GPU, so that only its sources are compared with what the adapter uses; 336 MB are
# downloaded for 57 MB.
newest=.cache/vllm-sources/0.33.0
if [ ! -d "$newest/vllm" ]; then
    "$environment/bin/pip" download --quiet --disable-pip-version-check --no-deps --dest "$newest" "vllm==${newest##*/}"
    "$environment/bin/python" scripts/unpack-sources.py "$newest"
fi
exec "$environment/bin/python" -m pytest -p no:cacheprovider tests/engines/vllm tests/fleet/test_routed.py tests/fleet/test_health_checks.py "$@"

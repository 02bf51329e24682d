#!/bin/sh
# Run the tests that drive SGLang's own code, in a separate environment, with stubs for GPU kernels; see docs/sglang.md.
# usage: test-sglang.sh ENVIRONMENT [arguments of pytest]
set -eu

environment=$1
shift

"${PYTHON:-python3}" -m venv "$environment"
"$environment/bin/pip" install --quiet --disable-pip-version-check --requirement scripts/sglang-requirements.txt
"$environment/bin/pip" install --quiet --disable-pip-version-check --no-deps sglang==0.5.23 --editable .
exec "$environment/bin/python" -m pytest -p no:cacheprovider tests/engines/sglang "$@"

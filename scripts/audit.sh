#!/bin/sh
# Write an SBOM of an environment, and look for known vulnerabilities in it.
# usage: audit.sh ENVIRONMENT CACHE TARGET    where to keep the tools, and where the SBOM goes
set -eu

environment=$1 cache=$2 target=$3
tools="cyclonedx-bom==7.5.0 pip-audit==2.10.1"

"${PYTHON:-python3}" -m venv "$cache"
# shellcheck disable=SC2086 # a list of words
"$cache/bin/pip" install --quiet $tools
mkdir -p "$target"
"$cache/bin/cyclonedx-py" environment --pyproject pyproject.toml --output-file "$target/sbom.cdx.json" "$environment/bin/python"
echo "SBOM: $target/sbom.cdx.json"
# What a registry does not know, such as this package itself, is listed as skipped.
"$cache/bin/pip-audit" --progress-spinner off --path "$environment"/lib/python3*/site-packages

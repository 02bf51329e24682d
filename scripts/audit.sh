#!/bin/sh
# Write an SBOM of an environment, and check it for known vulnerabilities.
# usage: audit.sh ENVIRONMENT CACHE TARGET    the tools are kept in CACHE, the SBOM goes to TARGET
set -eu

environment=$1 cache=$2 target=$3
tools="cyclonedx-bom==7.5.0 pip-audit==2.10.1"

"${PYTHON:-python3}" -m venv "$cache"
# shellcheck disable=SC2086 # a list of words
"$cache/bin/pip" install --quiet $tools
mkdir -p "$target"
"$cache/bin/cyclonedx-py" environment --pyproject pyproject.toml --output-file "$target/sbom.cdx.json" "$environment/bin/python"
echo "SBOM: $target/sbom.cdx.json"

report="$target/vulnerabilities.json"
rm -f "$report"
found=0
"$cache/bin/pip-audit" --progress-spinner off --format json --output "$report" \
    --path "$environment"/lib/python3*/site-packages 2> "$target/pip-audit.log" || found=$?
if [ ! -s "$report" ]; then
    tail -n 1 "$target/pip-audit.log" >&2
    echo "vulnerabilities: the registry could not be asked" >&2
    exit 0
fi
"$cache/bin/python" - "$report" << 'END'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    packages = json.load(file)["dependencies"]
unknown = sum("skip_reason" in package for package in packages)
print(f"vulnerabilities: {len(packages) - unknown} packages looked up, {unknown} unknown to the registry")
for package in packages:
    for known in package.get("vulns", ()):
        print(f"  {package['name']} {package['version']}: {known['id']}, mended in {', '.join(known['fix_versions'])}")
END
exit $found

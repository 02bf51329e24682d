#!/bin/sh
# Unpack Debian's package prometheus into a folder; it starts nothing. Only root must have it: without the lists of
# packages, which only root can fetch, the tests that need it are skipped.
# usage: install-prometheus.sh FOLDER
set -eu

folder=$1
if [ -x "$folder/usr/bin/prometheus" ] || ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    exit 0
fi
mkdir -p "$folder"
cd "$folder"
if [ "$(id -u)" = 0 ]; then
    apt-get download -qq prometheus 2>/dev/null || { apt-get update -qq && apt-get download -qq prometheus; }
else
    apt-get download -qq prometheus || exit 0
fi
dpkg-deb --extract prometheus_*.deb .
rm prometheus_*.deb

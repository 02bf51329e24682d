#!/bin/sh
# Unpack a package of Debian into a folder; it starts nothing. Only root must have it: without the lists of packages,
# which only root can fetch, the tests that need it are skipped.
# usage: unpack-package.sh PACKAGE PROGRAM FOLDER
set -eu

package=$1 program=$2 folder=$3
if [ -x "$folder/usr/bin/$program" ] || ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    exit 0
fi
mkdir -p "$folder"
cd "$folder"
if [ "$(id -u)" = 0 ]; then
    apt-get download -qq "$package" 2>/dev/null || { apt-get update -qq && apt-get download -qq "$package"; }
else
    apt-get download -qq "$package" || exit 0
fi
dpkg-deb --extract "${package}"_*.deb .
rm "${package}"_*.deb

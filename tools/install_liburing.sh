#!/usr/bin/env bash
# Builds liburing from source and installs it under /usr: for the manylinux images, whose
# distribution packages an old liburing and no static library.

set -euo pipefail
version=${LIBURING_VERSION:-2.9}

if [[ -e /usr/lib/liburing.a ]]; then exit 0; fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
git clone --quiet --depth 1 --branch "liburing-$version" https://github.com/axboe/liburing "$scratch"
cd "$scratch"
./configure --prefix=/usr --libdir=/usr/lib --libdevdir=/usr/lib
make -C src -j"$(nproc)" ENABLE_SHARED=0
make -C src install ENABLE_SHARED=0

#!/usr/bin/env bash
# Builds liburing from source and installs it in /usr. The manylinux images need this, because
# their distribution has an old liburing without a static library.

set -euo pipefail
# The commit of liburing-2.9. A tag could be moved to another commit.
commit=${LIBURING_COMMIT:-08468cc3830185c75f9e7edefd88aa01e5c2f8ab}

if [[ -e /usr/lib/liburing.a ]]; then exit 0; fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
git -C "$scratch" init --quiet
git -C "$scratch" fetch --quiet --depth 1 https://github.com/axboe/liburing "$commit"
git -C "$scratch" checkout --quiet "$commit"
cd "$scratch"
./configure --prefix=/usr --libdir=/usr/lib --libdevdir=/usr/lib
make -C src -j"$(nproc)" ENABLE_SHARED=0
make -C src install ENABLE_SHARED=0

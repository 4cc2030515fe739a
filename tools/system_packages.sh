#!/usr/bin/env bash
# Installs the missing system packages for building and testing tensorferry.
# As root on Debian or Ubuntu, it installs them. Otherwise it prints the command that installs them.
# It fails only if a package that the build requires is still missing at the end.
#
# Usage: tools/system_packages.sh PYTHON

set -euo pipefail
python=${1:-python3}

# need: a command that finds the requirement, its Debian package, its Fedora package, and whether the build requires it.
apt_missing=() dnf_missing=() required_missing=()

need() {
  local found=$1 apt=$2 dnf=$3 required=$4
  if ! eval "$found" > /dev/null 2>&1; then
    apt_missing+=("$apt")
    dnf_missing+=("$dnf")
    if [[ $required == required ]]; then required_missing+=("$apt"); fi
  fi
}

header() { echo "#include <$1>" | "${CXX:-c++}" -E -x c++ -; }
library() { [[ $(/sbin/ldconfig -p) == *"$1"* ]]; }
command_in_sbin() { PATH="$PATH:/sbin:/usr/sbin" command -v "$1"; }
python_headers() {
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}

check() {
  apt_missing=() dnf_missing=() required_missing=()
  need '"${CXX:-c++}" --version' g++ gcc-c++ required
  need 'header liburing.h' liburing-dev liburing-devel required
  need 'header doctest/doctest.h' doctest-dev doctest-devel tests
  need '"$python" -c "import ensurepip, venv"' python3-venv python3 required
  need python_headers python3-dev python3-devel required
  need 'command -v fio' fio fio tests
  need 'header libaio.h' libaio-dev libaio-devel tests
  need 'command -v fusermount3' fuse3 fuse3 tests
  need 'library libfuse3.so' fuse3 fuse3 tests
  need 'library libseccomp.so.2' libseccomp2 libseccomp tests
  need 'command -v strace' strace strace tests
  need 'command_in_sbin mkfs.ext4' e2fsprogs e2fsprogs tests
  need 'command_in_sbin mkfs.xfs' xfsprogs xfsprogs tests
}

check
if ((${#apt_missing[@]} == 0)); then exit 0; fi

if [[ $(id -u) == 0 ]] && command -v apt-get > /dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  echo "Installing ${apt_missing[*]}"
  # Wait for a concurrent installation, such as that of a second checkout.
  install=(apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "${apt_missing[@]}")
  "${install[@]}" || { apt-get update && "${install[@]}"; }
  check
fi

if ((${#apt_missing[@]} > 0)); then
  if command -v dnf > /dev/null; then
    echo "Missing system packages; install them with: sudo dnf install ${dnf_missing[*]}" >&2
  else
    echo "Missing system packages; install them with: sudo apt-get install ${apt_missing[*]}" >&2
  fi
fi
if ((${#required_missing[@]} > 0)); then exit 1; fi

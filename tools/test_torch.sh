#!/usr/bin/env bash
# Runs the checkpoint tests with another version of torch, in a separate environment in build/.
#
#     tools/test_torch.sh VERSION [PYTEST ARGUMENTS...]
#
# This installs the ordinary package from PyPI, with several GB of CUDA libraries that it needs for its import, even
# without a GPU.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=${1:?usage: tools/test_torch.sh VERSION [PYTEST ARGUMENTS...]}
shift
environment=build/torch-$version
python=$environment/bin/python

if [[ ! -e $environment/.ready ]]; then
  "${PYTHON:-python3}" -m venv "$environment"
  "$python" -m pip install --quiet --upgrade 'pip>=25.1'
  # Older versions may not support the newest NumPy.
  "$python" -m pip install --quiet "torch==$version" 'numpy<2.3'
  "$python" -m pip install --quiet "torch==$version" 'numpy<2.3' --group build --group test
  touch "$environment/.ready"
fi
"$python" -m pip install --quiet --no-build-isolation --no-deps \
  --config-settings=build-dir="$environment/core" --editable .
exec "$python" -m pytest tests/checkpoint "$@"

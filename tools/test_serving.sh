#!/usr/bin/env bash
# Tests the load formats with the real vLLM or SGLang, in a separate environment in build/. It does not need a GPU.
#
#     tools/test_serving.sh vllm|sglang WHEEL TORCH [PYTEST ARGUMENTS...]
#
# WHEEL is the wheel of tensorferry. TORCH is the requirement for torch, in the version that this vLLM needs. vLLM is
# installed from its sources without kernels, as for development on the CPU. SGLang's wheel does not contain kernels.
# Most of its dependencies are GPU kernels; only the packages that its loaders import are installed.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

vllm=0.31.0
sglang=0.5.23
sglang_needs=(
  aiohttp
  compressed-tensors==0.18.0
  dill
  einops
  fastapi
  gguf
  ipython
  mistral_common==1.13.1
  msgspec
  numpy
  openai==2.8.0
  orjson
  partial_json_parser
  pillow
  psutil
  pybase64
  pydantic
  python-multipart
  pyzmq
  regex
  requests
  scipy
  sentencepiece==0.2.1
  setproctitle
  tiktoken
  transformers==5.19.0
  uvicorn
  xgrammar==0.2.7
)

usage="usage: tools/test_serving.sh vllm|sglang WHEEL TORCH [PYTEST ARGUMENTS...]"
program=${1:?$usage}
wheel=${2:?$usage}
torch=${3:?$usage}
shift 3
environment=build/$program-${!program}
python=$environment/bin/python

if [[ ! -e $environment/.ready ]]; then
  "${PYTHON:-python3}" -m venv --clear "$environment"
  "$python" -m pip install --quiet --upgrade 'pip>=25.1'
  "$python" -m pip install --quiet "$torch" numpy 'pytest>=9' 'pytest-timeout>=2.3'
  case $program in
    vllm)
      "$python" -m pip install --quiet \
        'cmake>=3.26' jinja2 ninja 'packaging>=24.2' regex 'setuptools==77.0.3' 'setuptools-rust>=1.9' \
        'setuptools-scm>=8' wheel
      # CARGO=false skips the Rust parts, without which vLLM's build continues. VLLM_SKIP_VERSION_SUFFIX keeps the
      # version as requested, which pip checks.
      CARGO=false VLLM_TARGET_DEVICE=empty VLLM_SKIP_VERSION_SUFFIX=1 \
        "$python" -m pip install --quiet --no-build-isolation --no-binary vllm "$torch" "vllm==$vllm"
      ;;
    sglang)
      "$python" -m pip install --quiet "$torch" "${sglang_needs[@]}"
      "$python" -m pip install --quiet --no-deps "sglang==$sglang" torchvision==0.28.0
      ;;
  esac
  touch "$environment/.ready"
fi
"$python" -m pip install --quiet --no-deps --force-reinstall "$wheel"
# The tests import the installed package, not the sources. tests/conftest.py needs packages that are not installed here.
VLLM_TARGET_DEVICE=cpu HF_HUB_OFFLINE=1 exec "$python" -m pytest --noconftest -p no:cacheprovider "tests/serving/test_$program.py" "$@"

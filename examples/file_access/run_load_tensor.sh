#!/usr/bin/env bash
# Run all load programs on one file: run_load_tensor.sh FILE [--loop N] [--validate]
# PYTHON selects the interpreter. A program prints a message and is skipped if a GPU or GPUDirect Storage is missing.
set -u

if [ $# -lt 1 ]; then
    echo "usage: $0 <input file on the drive> [--loop N] [--validate]" >&2
    exit 2
fi
input_file=$1
shift

status=0
for program in aio_load_cpu_tensor.py aio_load_gpu_tensor.py gds_load_gpu_tensor.py \
    py_load_cpu_tensor.py py_load_gpu_tensor.py; do
    echo "$program --input_file $input_file $*"
    "${PYTHON:-python3}" "$(dirname "$0")/$program" --input_file "$input_file" "$@"
    case $? in
        0 | 3) ;;            # 3: a requirement is missing
        2) exit 2 ;;         # invalid arguments, which are the same for all programs
        130) exit 130 ;;     # Ctrl-C
        *) status=1 ;;
    esac
done
exit $status

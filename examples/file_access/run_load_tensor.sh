#!/usr/bin/env bash
# Run all load programs on one file: run_load_tensor.sh FILE [--loop N] [--validate]
# PYTHON chooses the interpreter. A program that misses a GPU or GPUDirect Storage says so and is passed over.
set -u

if [ $# -lt 1 ]; then
    echo "usage: $0 <input file on the drive to try> [--loop N] [--validate]" >&2
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
        0 | 3) ;;            # 3: what it needs is not here
        2) exit 2 ;;         # wrong arguments: the same for all
        130) exit 130 ;;     # Ctrl-C
        *) status=1 ;;
    esac
done
exit $status

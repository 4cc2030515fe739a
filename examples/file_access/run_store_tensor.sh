#!/usr/bin/env bash
# Run all store programs in one folder: run_store_tensor.sh FOLDER [--mb_size N] [--loop N] [--no_sync] [--validate]
# PYTHON selects the interpreter. A program prints a message and is skipped if a GPU or GPUDirect Storage is missing.
set -u

if [ $# -lt 1 ]; then
    echo "usage: $0 <folder on the drive> [--mb_size N] [--loop N] [--no_sync] [--validate]" >&2
    exit 2
fi
nvme_folder=$1
shift

status=0
for program in aio_store_cpu_tensor.py aio_store_gpu_tensor.py gds_store_gpu_tensor.py \
    py_store_cpu_tensor.py py_store_gpu_tensor.py; do
    echo "$program --nvme_folder $nvme_folder $*"
    "${PYTHON:-python3}" "$(dirname "$0")/$program" --nvme_folder "$nvme_folder" "$@"
    case $? in
        0 | 3) ;;            # 3: a requirement is missing
        2) exit 2 ;;         # invalid arguments, which are the same for all programs
        130) exit 130 ;;     # Ctrl-C
        *) status=1 ;;
    esac
done
exit $status

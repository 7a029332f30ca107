#!/usr/bin/env bash
# Measures anew what docs/benchmarks/results.md says of a GPU: `docs/benchmarks/measure_gpu.sh FOLDER [PART...]`.
#
# Of the parts all, unless some are named. What each command prints goes to a file of its own in FOLDER; the last lines
# are shown. Needs an NVIDIA GPU and what `pip install '.[dev]'` installs.
set -u
ALL="tests sanitizer steps model prefill kmeans whole"
[ $# -gt 0 ] || { echo "usage: docs/benchmarks/measure_gpu.sh FOLDER [PART...], of: $ALL" >&2; exit 2; }
folder=$(realpath -m "$1")
shift
for part in "$@"; do
    case " $ALL " in *" $part "*) ;; *) echo "no part is called $part; there are: $ALL" >&2; exit 2 ;; esac
done
cd "$(dirname "$0")/../.." || exit 2
mkdir -p "$folder"
failed=0

measure() { # NAME SHOWN COMMAND...: shows so many of the last lines
    local file="$folder/$1.txt" shown=$2
    echo "== $1: ${*:3}"
    "${@:3}" > "$file" 2>&1 || { echo "== $1: exit code $?"; failed=1; }
    tail -n "$shown" "$file"
}

tests() { measure tests 3 python -m pytest -m gpu -n 8; }

sanitize() { # TOOL
    local name
    for name in cluster_choice listed_choice shared_choice decode_attention shared_decode list_ranks top_ranks row_ranks code_ranks joint_ranks joined kmeans_triton quoka_triton chunk_rows; do
        measure "$1-$name" 2 compute-sanitizer --tool "$1" --error-exitcode 9 \
            python -m pytest -m gpu tests/kernels/*/test_$name.py
    done
    exit "$failed"
}

sanitizer() {
    # Every tensor in memory of its own, so that what is past it is nobody's.
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    local tool pid pids=()
    for tool in memcheck racecheck; do
        sanitize "$tool" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
    unset PYTORCH_NO_CUDA_MEMORY_CACHING
}

steps() {
    local number=0 command
    while read -r command; do
        number=$((number + 1))
        # shellcheck disable=SC2086  # words of a command
        measure "step-$number" 30 $command -q < /dev/null
    done < <(grep '^sparsekv bench ' docs/benchmarks/results.md)
}

model() {
    measure model 12 sparsekv bench-model --config qwen3-8b --context 128K --batch 16 --method multipole --budget 5%
}
prefill() { measure prefill 20 python docs/benchmarks/time_prefill.py; }
kmeans() { measure kmeans 20 python docs/benchmarks/time_kmeans.py; }
whole() { measure whole 30 python docs/benchmarks/real_size.py "$folder/whole"; }

# shellcheck disable=SC2086  # names of parts
for part in ${*:-$ALL}; do "$part"; done
exit "$failed"

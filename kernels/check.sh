#!/usr/bin/env bash
# The kernels' own tests, plain and under sanitizers. Usage: kernels/check.sh [build folder]
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
build="${1:-$here/build/check}"
mkdir -p "$build"
for sanitizer in none address,undefined thread; do
    flags=(-DOUTPACE_TESTS=ON)
    [ "$sanitizer" = none ] || flags+=("-DOUTPACE_SANITIZE=$sanitizer")
    folder="$build/${sanitizer/,/-}"
    cmake -S "$here" -B "$folder" "${flags[@]}" >"$folder.log" 2>&1 || { cat "$folder.log"; exit 1; }
    cmake --build "$folder" --parallel 2 >>"$folder.log" 2>&1 || { cat "$folder.log"; exit 1; }
    echo "$sanitizer: $("$folder/test_kernels")"
done

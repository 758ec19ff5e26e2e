#!/usr/bin/env bash
# Programs that Zig's C compiler builds are told that the processor has no AVX2.
#
# ziglang 0.17.1 from PyPI, on an x86-64 processor with AVX2, no other package. GCC and Clang document
# __builtin_cpu_supports for choosing code at run time. `zig cc` and `zig c++` compile it and link it,
# and the answer is no for every feature, also after __builtin_cpu_init. So code that chooses its
# kernels by it falls back to the slowest ones, without a warning. The cpuid instruction, asked by
# <cpuid.h>, tells the truth in the same program.
#
# Output seen on 2026-11-29:
#     __builtin_cpu_supports   no
#     cpuid                    yes
#
# Exit status 0: it is still so; 2: this processor has no AVX2, so that nothing can be seen.
set -euo pipefail

grep -q avx2 /proc/cpuinfo || exit 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ziglang==0.17.1
cat > "$folder/case.c" <<'C'
#include <cpuid.h>
#include <stdio.h>

int main(void) {
  unsigned eax, ebx = 0, ecx, edx;
  __builtin_cpu_init();
  int builtin = __builtin_cpu_supports("avx2") != 0;
  __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx);
  int asked = (ebx & bit_AVX2) != 0;
  printf("__builtin_cpu_supports   %s\n", builtin ? "yes" : "no");
  printf("cpuid                    %s\n", asked ? "yes" : "no");
  return !(asked && !builtin);
}
C
target=x86_64-linux-gnu.2.17
"$folder/venv/bin/python" -m ziglang cc -target "$target" -O2 "$folder/case.c" -o "$folder/case"
"$folder/case"

// Which instruction sets this machine can run.
#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace outpace {

extern const Kernels portable_kernels;
#ifdef OUTPACE_X86
extern const Kernels avx2_kernels, avx512_kernels;
#ifdef OUTPACE_AVX_VNNI
extern const Kernels avx_vnni_kernels;
#endif
#endif
#ifdef OUTPACE_NEON
extern const Kernels neon_kernels;
#endif

std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> found;
#ifdef OUTPACE_X86
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512vnni");
    if (has_avx2 && has_avx512) found.push_back(&avx512_kernels);
#ifdef OUTPACE_AVX_VNNI
    if (has_avx2 && __builtin_cpu_supports("avxvnni")) found.push_back(&avx_vnni_kernels);
#endif
    if (has_avx2) found.push_back(&avx2_kernels);
#endif
#ifdef OUTPACE_NEON
#ifdef __linux__
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) found.push_back(&neon_kernels);
#else
    found.push_back(&neon_kernels);  // every 64-bit Apple processor since 2018 has it
#endif
#endif
    found.push_back(&portable_kernels);
    return found;
}

const Kernels* find_kernels(const std::string& name) {
    for (const Kernels* kernels : available_kernels())
        if (name.empty() || name == kernels->name) return kernels;
    return nullptr;
}

}  // namespace outpace

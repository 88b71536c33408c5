// Finds the instruction sets that this machine can run.
#include "kernels.h"

#ifdef OUTPACE_X86
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(_WIN32)
#include <windows.h>
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

#ifdef OUTPACE_X86
namespace {

/// Features of the processor that the operating system also saves for threads. The compilers' builtin needs a library
/// that Clang lacks on Windows.
struct Processor {
    unsigned one = 0, seven_b = 0, seven_c = 0, seven_one_a = 0;  // registers of cpuid, by leaf
    unsigned kept = 0;  // register state saved by the operating system
    bool is_amd = false;

    Processor() {
        unsigned a, b, c, d;
        if (__get_cpuid(0, &a, &b, &c, &d)) is_amd = b == signature_AMD_ebx && c == signature_AMD_ecx;
        if (__get_cpuid(1, &a, &b, &c, &d)) one = c;
        if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) seven_b = b, seven_c = c;
        if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) seven_one_a = a;
        if (one >> 27 & 1) asm volatile("xgetbv" : "=a"(kept), "=d"(d) : "c"(0));
    }
    bool keeps(unsigned registers) const { return (kept & registers) == registers; }
    bool has_avx2() const {
        const bool has_fma = one >> 12 & 1, has_f16c = one >> 29 & 1, has_integers = seven_b >> 5 & 1;
        return has_fma && has_f16c && has_integers && keeps(0x6);
    }
    bool has_avx512_vnni() const {
        const unsigned needed = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
        return has_avx2() && (seven_b & needed) == needed && (seven_c >> 11 & 1) && keeps(0xE6);
    }
    bool has_avx_vnni() const { return has_avx2() && (seven_one_a >> 4 & 1); }
};

}  // namespace
#endif

PrefetchPolicy prefetch_policy() {
#ifdef OUTPACE_X86
    static const bool is_amd = Processor().is_amd;
    return {is_amd, is_amd};
#else
    return {false, false};
#endif
}

std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> found;
#ifdef OUTPACE_X86
    const Processor processor;
    if (processor.has_avx512_vnni()) found.push_back(&avx512_kernels);
#ifdef OUTPACE_AVX_VNNI
    if (processor.has_avx_vnni()) found.push_back(&avx_vnni_kernels);
#endif
    if (processor.has_avx2()) found.push_back(&avx2_kernels);
#endif
#ifdef OUTPACE_NEON
#ifdef __linux__
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) found.push_back(&neon_kernels);
#elif defined(_WIN32)
    if (IsProcessorFeaturePresent(PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE)) found.push_back(&neon_kernels);
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

// Sixteen lanes in two AVX2 registers. With AVX-VNNI a product is one instruction, without it four.
#pragma once

#include <immintrin.h>

#include <cmath>

#include "formats.h"
#include "half.h"
#include "layout.h"

namespace outpace {
namespace {

constexpr int kTileRows = 4;
constexpr int kTileVectors = 1;  // 8 registers of int32 sums; the float32 sums are touched once per part
constexpr int kQueries = 2;
constexpr int kMixVectors = 2;

struct Floats {
    __m256 lo, hi;

    static Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static Floats load(const Half* p) {
        const auto* eights = reinterpret_cast<const __m128i*>(p);
        return {_mm256_cvtph_ps(_mm_loadu_si128(eights)), _mm256_cvtph_ps(_mm_loadu_si128(eights + 1))};
    }
    void store(float* p) const {
        _mm256_storeu_ps(p, lo);
        _mm256_storeu_ps(p + 8, hi);
    }
};

inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Floats abs(Floats a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}

inline float sum(Floats a) {
    const __m256 eight = _mm256_add_ps(a.lo, a.hi);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float largest(Floats a) {
    const __m256 eight = _mm256_max_ps(a.lo, a.hi);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

struct Ints {
    __m256i lo, hi;

    static Ints all(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
    Floats to_floats() const { return {_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi)}; }
    void store_bytes(int8_t* p) const {
        const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(lo, hi), 0xd8);
        const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
    }
};

inline Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline int32_t sum(Ints a) {
    const __m256i eight = _mm256_add_epi32(a.lo, a.hi);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline Ints round(Floats a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline __m256 times_power(__m256 a, __m256i n) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(n, 23)));
}
inline Floats times_power(Floats a, Ints n) { return {times_power(a.lo, n.lo), times_power(a.hi, n.hi)}; }

inline Floats load_bfloat16(const uint8_t* p) {
    const auto* eights = reinterpret_cast<const __m128i*>(p);
    const __m256i lo = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(eights)), 16);
    const __m256i hi = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(eights + 1)), 16);
    return {_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi)};
}

inline Floats load_bytes(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m256i lo = _mm256_cvtepi8_epi32(bytes), hi = _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8));
    return {_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi)};
}

inline __m256 powers(__m256i exponents) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(exponents, 23), _mm256_set1_epi32(1 << 22)));
}
inline Floats load_powers(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {powers(_mm256_cvtepu8_epi32(bytes)), powers(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}

struct Bytes {
    __m256i lo, hi;

    static Bytes load(const uint8_t* p) {
        const auto* halves = reinterpret_cast<const __m256i*>(p);
        return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
    }
    void store(uint8_t* p) const {
        auto* halves = reinterpret_cast<__m256i*>(p);
        _mm256_storeu_si256(halves, lo);
        _mm256_storeu_si256(halves + 1, hi);
    }
};

inline Bytes operator|(Bytes a, Bytes b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }

/// Shifts move 16 bits at once; the mask drops bits of the other byte.
template <int Left, int Mask>
inline __m256i bits(__m256i a) {
    const __m256i mask = _mm256_set1_epi8(Mask);
    if constexpr (Left > 0) return _mm256_and_si256(_mm256_slli_epi16(a, Left), mask);
    if constexpr (Left < 0) return _mm256_and_si256(_mm256_srli_epi16(a, -Left), mask);
    return _mm256_and_si256(a, mask);
}
template <int Left, int Mask>
inline Bytes bits(Bytes a) {
    return {bits<Left, Mask>(a.lo), bits<Left, Mask>(a.hi)};
}

#ifdef __AVXVNNI__

using NibbleSums = Ints;

struct Weights {
    __m256i lo, hi;

    static Weights load(const uint8_t* p) {
        const auto* halves = reinterpret_cast<const __m256i*>(p);
        return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
    }
};

struct Quad {
    __m256i v;

    static Quad load(const int8_t* p) {
        int32_t four;
        __builtin_memcpy(&four, p, 4);
        return {_mm256_set1_epi32(four)};
    }
};

inline Ints begin(int32_t offset) { return Ints::all(offset); }

/// vpdpbusd: unsigned weights (w + 128) times signed activations, four products summed in int32 without saturation.
inline Ints dot(Ints sums, Weights w, Quad a) {
    return {_mm256_dpbusd_avx_epi32(sums.lo, w.lo, a.v), _mm256_dpbusd_avx_epi32(sums.hi, w.hi, a.v)};
}

inline Weights lookup(Bytes a, const uint8_t* numbers) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
    return {_mm256_shuffle_epi8(table, a.lo), _mm256_shuffle_epi8(table, a.hi)};
}

inline Ints dot(Ints sums, Bytes q, Quad a) {
    return {_mm256_dpbusd_avx_epi32(sums.lo, q.lo, a.v), _mm256_dpbusd_avx_epi32(sums.hi, q.hi, a.v)};
}

#else


/// Signed weights again: w + 128 with its top bit flipped is w.
struct Weights {
    __m256i lo, hi;

    static Weights load(const uint8_t* p) {
        const auto* halves = reinterpret_cast<const __m256i*>(p);
        const __m256i flip = _mm256_set1_epi8(-128);
        return {_mm256_xor_si256(_mm256_loadu_si256(halves), flip),
                _mm256_xor_si256(_mm256_loadu_si256(halves + 1), flip)};
    }
};

struct Quad {
    __m256i v;

    static Quad load(const int8_t* p) {
        int32_t four;
        __builtin_memcpy(&four, p, 4);
        return {_mm256_set1_epi32(four)};
    }
};

inline Ints begin(int32_t) { return Ints::all(0); }  // the weights are signed, so there is nothing to subtract

/// Keeps the written order: compilers would add the products of a whole part as a tree, for which there are not enough
/// registers.
inline __m256i in_order(__m256i sums) {
    asm("" : "+x"(sums));
    return sums;
}

inline __m256i add_pairs(__m256i sums, __m256i pairs) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

/// |w| * (a with w's sign): two products are at most 2 * 128 * 127 = 32512, so vpmaddubsw does not saturate. A file may
/// hold the weight -128, whose magnitude is a byte without a sign; no activation is -128.
inline __m256i dot(__m256i sums, __m256i w, Quad a) {
    return add_pairs(sums, _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a.v, w)));
}
inline Ints dot(Ints sums, Weights w, Quad a) { return {dot(sums.lo, w.lo, a), dot(sums.hi, w.hi, a)}; }

inline Weights lookup(Bytes a, const uint8_t* numbers) {
    const __m128i stored = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers));
    const __m256i table = _mm256_broadcastsi128_si256(_mm_xor_si128(stored, _mm_set1_epi8(-128)));
    return {_mm256_shuffle_epi8(table, a.lo), _mm256_shuffle_epi8(table, a.hi)};
}

/// Sums of nibbles times bytes in 16 bits: two products are at most 2 * 15 * 127 = 3810, so the eight of a part's 32
/// inputs fit. They take two instructions each instead of three.
struct NibbleSums {
    __m256i lo = _mm256_setzero_si256(), hi = _mm256_setzero_si256();

    Ints to_ints() const { return {add_pairs(_mm256_setzero_si256(), lo), add_pairs(_mm256_setzero_si256(), hi)}; }
};

inline NibbleSums dot(NibbleSums sums, Bytes q, Quad a) {
    return {in_order(_mm256_add_epi16(sums.lo, _mm256_maddubs_epi16(q.lo, a.v))),
            in_order(_mm256_add_epi16(sums.hi, _mm256_maddubs_epi16(q.hi, a.v)))};
}

/// Two products are at most 2 * 63 * 127 = 16002.
inline Ints dot(Ints sums, Bytes q, Quad a) {
    return {in_order(add_pairs(sums.lo, _mm256_maddubs_epi16(q.lo, a.v))),
            in_order(add_pairs(sums.hi, _mm256_maddubs_epi16(q.hi, a.v)))};
}

#endif

}  // namespace
}  // namespace outpace

// Sixteen lanes in one AVX-512 register; VNNI multiplies bytes.
#pragma once

#include <immintrin.h>

#include <cmath>

#include "formats.h"
#include "half.h"
#include "layout.h"

namespace outpace {
namespace {

constexpr int kTileRows = 6;     // 12 sums in int32 and 12 in float32 leave 8 of 32 registers
constexpr int kTileVectors = 2;
constexpr int kQueries = 8;
constexpr int kMixVectors = 4;

struct Floats {
    __m512 v;

    static Floats all(float x) { return {_mm512_set1_ps(x)}; }
    static Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static Floats load(const Half* p) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
};

inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats abs(Floats a) { return {_mm512_abs_ps(a.v)}; }

inline __m256 upper_half(__m512 a) { return _mm512_extractf32x8_ps(a, 1); }

inline float sum(Floats a) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), upper_half(a.v));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float largest(Floats a) {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.v), upper_half(a.v));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

struct Ints {
    __m512i v;

    static Ints all(int32_t x) { return {_mm512_set1_epi32(x)}; }
    Floats to_floats() const { return {_mm512_cvtepi32_ps(v)}; }
};

/// Does the same as the function in rowwise.h.
inline void store_bytes(const Ints (&a)[4], int8_t* p, int32_t* sums) {
    __m512i all = _mm512_castsi128_si512(_mm512_cvtepi32_epi8(a[0].v));
    all = _mm512_inserti32x4(all, _mm512_cvtepi32_epi8(a[1].v), 1);
    all = _mm512_inserti32x4(all, _mm512_cvtepi32_epi8(a[2].v), 2);
    all = _mm512_inserti32x4(all, _mm512_cvtepi32_epi8(a[3].v), 3);
    _mm512_storeu_si512(p, all);
    __m512i part = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), all);  // of four numbers each
    part = _mm512_add_epi32(part, _mm512_shuffle_epi32(part, _MM_PERM_BADC));
    part = _mm512_add_epi32(part, _mm512_shuffle_epi32(part, _MM_PERM_CDAB));
    const __m512i firsts = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
    const __m128i four = _mm512_castsi512_si128(_mm512_permutexvar_epi32(firsts, part));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(sums), four);
}

inline Ints round(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }
inline Floats times_power(Floats a, Ints n) {
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(n.v, 23)))};
}

struct Weights {
    __m512i v;

    static Weights load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
};

struct Quad {
    __m512i v;

    static Quad load(const int8_t* p) {
        int32_t four;
        __builtin_memcpy(&four, p, 4);
        return {_mm512_set1_epi32(four)};
    }
};

inline Ints begin(int32_t offset) { return Ints::all(offset); }

/// vpdpbusd: unsigned weights (w + 128) times signed activations, four products summed in int32 without saturation.
inline Ints dot(Ints sums, Weights w, Quad a) { return {_mm512_dpbusd_epi32(sums.v, w.v, a.v)}; }

struct Bytes {
    __m512i v;

    static Bytes load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
    void store(uint8_t* p) const { _mm512_storeu_si512(p, v); }
};

inline Bytes operator|(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }

/// Shifts move 16 bits at once; the mask drops bits of the other byte.
template <int Left, int Mask>
inline Bytes bits(Bytes a) {
    const __m512i mask = _mm512_set1_epi8(Mask);
    if constexpr (Left > 0) return {_mm512_and_si512(_mm512_slli_epi16(a.v, Left), mask)};
    if constexpr (Left < 0) return {_mm512_and_si512(_mm512_srli_epi16(a.v, -Left), mask)};
    return {_mm512_and_si512(a.v, mask)};
}

inline Weights lookup(Bytes a, const uint8_t* numbers) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers));
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), a.v)};
}

using NibbleSums = Ints;

inline Ints dot(Ints sums, Bytes q, Quad a) { return {_mm512_dpbusd_epi32(sums.v, q.v, a.v)}; }

inline Floats load_bytes(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

inline Floats load_powers(const uint8_t* p) {
    const __m512i exponents = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(exponents, 23), _mm512_set1_epi32(1 << 22)))};
}

inline Floats load_bfloat16(const uint8_t* p) {
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16))};
}

}  // namespace
}  // namespace outpace

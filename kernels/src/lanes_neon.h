// Sixteen lanes in four Arm registers; the dot product extension multiplies bytes.
#pragma once

#include <arm_neon.h>

#include <cmath>
#include <cstring>

#include "formats.h"
#include "half.h"
#include "layout.h"

namespace outpace {
namespace {

constexpr int kTileRows = 4;
constexpr int kTileVectors = 1;
constexpr int kQueries = 2;
constexpr int kMixVectors = 2;

struct Floats {
    float32x4_t v[4];

    static Floats all(float x) { return {{vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}}; }
    static Floats load(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}}; }
    static Floats load(const Half* p) {
        Floats r;
        for (int i = 0; i < 4; ++i) r.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p[4 * i].bits)));
        return r;
    }
    void store(float* p) const {
        for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, v[i]);
    }
};

template <class F>
inline Floats each(F f) {
    return {{f(0), f(1), f(2), f(3)}};
}
inline Floats operator+(Floats a, Floats b) { return each([&](int i) { return vaddq_f32(a.v[i], b.v[i]); }); }
inline Floats operator*(Floats a, Floats b) { return each([&](int i) { return vmulq_f32(a.v[i], b.v[i]); }); }
inline Floats operator/(Floats a, Floats b) { return each([&](int i) { return vdivq_f32(a.v[i], b.v[i]); }); }
inline Floats fma(Floats a, Floats b, Floats c) { return each([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); }); }
inline Floats max(Floats a, Floats b) {
    return each([&](int i) { return vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
inline Floats min(Floats a, Floats b) {
    return each([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
inline Floats abs(Floats a) { return each([&](int i) { return vabsq_f32(a.v[i]); }); }

inline float sum(Floats a) {
    const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float largest(Floats a) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
}

struct Ints {
    int32x4_t v[4];

    static Ints all(int32_t x) { return {{vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}}; }
    Floats to_floats() const {
        return each([&](int i) { return vcvtq_f32_s32(v[i]); });
    }
    void store_bytes(int8_t* p) const {
        const int16x8_t lo = vcombine_s16(vmovn_s32(v[0]), vmovn_s32(v[1]));
        const int16x8_t hi = vcombine_s16(vmovn_s32(v[2]), vmovn_s32(v[3]));
        vst1q_s8(p, vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
    }
};

inline int32_t sum(Ints a) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3])));
}
inline Ints round(Floats a) {
    return {{vcvtnq_s32_f32(a.v[0]), vcvtnq_s32_f32(a.v[1]), vcvtnq_s32_f32(a.v[2]), vcvtnq_s32_f32(a.v[3])}};
}
inline Floats times_power(Floats a, Ints n) {
    return each([&](int i) {
        return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a.v[i]), vshlq_n_s32(n.v[i], 23)));
    });
}

inline Floats load_bfloat16(const uint8_t* p) {
    return each([&](int i) {
        const uint16x4_t high = vreinterpret_u16_u8(vld1_u8(p + 8 * i));
        return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(high), 16));
    });
}

/// Signed weights again: w + 128 with its top bit flipped is w.
struct Weights {
    int8x16_t v[4];

    static Weights load(const uint8_t* p) {
        Weights r;
        for (int i = 0; i < 4; ++i) r.v[i] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 16 * i), vdupq_n_u8(0x80)));
        return r;
    }
};

struct Quad {
    int8x16_t v;

    static Quad load(const int8_t* p) {
        int32_t four;
        std::memcpy(&four, p, 4);
        return {vreinterpretq_s8_s32(vdupq_n_s32(four))};
    }
};

inline Ints begin(int32_t) { return Ints::all(0); }  // the weights are signed, so there is nothing to subtract

/// sdot: four signed products summed in int32.
inline Ints dot(Ints sums, const Weights& w, Quad a) {
    for (int i = 0; i < 4; ++i) sums.v[i] = vdotq_s32(sums.v[i], w.v[i], a.v);
    return sums;
}

struct Bytes {
    uint8x16_t v[4];

    static Bytes load(const uint8_t* p) { return {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}}; }
    void store(uint8_t* p) const {
        for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, v[i]);
    }
};

inline Bytes operator|(const Bytes& a, const Bytes& b) {
    return {{vorrq_u8(a.v[0], b.v[0]), vorrq_u8(a.v[1], b.v[1]), vorrq_u8(a.v[2], b.v[2]), vorrq_u8(a.v[3], b.v[3])}};
}

template <int Left, int Mask>
inline uint8x16_t bits(uint8x16_t a) {
    const uint8x16_t mask = vdupq_n_u8(Mask);
    if constexpr (Left > 0) return vandq_u8(vshlq_n_u8(a, Left), mask);
    if constexpr (Left < 0) return vandq_u8(vshrq_n_u8(a, -Left), mask);
    return vandq_u8(a, mask);
}
template <int Left, int Mask>
inline Bytes bits(const Bytes& a) {
    return {{bits<Left, Mask>(a.v[0]), bits<Left, Mask>(a.v[1]), bits<Left, Mask>(a.v[2]), bits<Left, Mask>(a.v[3])}};
}

inline Weights lookup(const Bytes& a, const uint8_t* numbers) {
    const int8x16_t table = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(numbers), vdupq_n_u8(0x80)));
    return {{vqtbl1q_s8(table, a.v[0]), vqtbl1q_s8(table, a.v[1]), vqtbl1q_s8(table, a.v[2]), vqtbl1q_s8(table, a.v[3])}};
}

using NibbleSums = Ints;

/// Numbers up to 63 have the same bits with a sign.
inline Ints dot(Ints sums, const Bytes& q, Quad a) {
    for (int i = 0; i < 4; ++i) sums.v[i] = vdotq_s32(sums.v[i], vreinterpretq_s8_u8(q.v[i]), a.v);
    return sums;
}

inline Floats load_powers(const uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    const uint16x8_t lo = vmovl_u8(vget_low_u8(bytes)), hi = vmovl_u8(vget_high_u8(bytes));
    const uint16x4_t parts[] = {vget_low_u16(lo), vget_high_u16(lo), vget_low_u16(hi), vget_high_u16(hi)};
    return each([&](int i) {
        return vreinterpretq_f32_u32(vmaxq_u32(vshlq_n_u32(vmovl_u16(parts[i]), 23), vdupq_n_u32(1u << 22)));
    });
}

inline Floats load_bytes(const uint8_t* p) {
    const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
    const int16x8_t lo = vmovl_s8(vget_low_s8(bytes)), hi = vmovl_s8(vget_high_s8(bytes));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(lo))),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(hi)))}};
}

}  // namespace
}  // namespace outpace

// IEEE half precision and bfloat16 by integer arithmetic, so that every machine stores the same bits.
#pragma once

#include <cstring>

#include "layout.h"

namespace outpace {
namespace {

inline float half_to_float(Half h) {
    const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
    uint32_t exponent = (h.bits >> 10) & 31u;
    uint32_t mantissa = h.bits & 0x3ffu;
    uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000u | (mantissa << 13);
    } else if (exponent != 0) {
        bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
    } else {  // zero, or a number below 2^-14: a multiple of 2^-24
        const float value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

/// Rounds to nearest, ties to even. Larger numbers become 65504, so that no value is infinite.
inline Half float_to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7bffu)};
    if (bits < 0x38800000u) {  // below 2^-14: adding 0.5 leaves a multiple of 2^-24 in the last bits, rounded
        float small;
        std::memcpy(&small, &bits, 4);
        small += 0.5f;
        std::memcpy(&bits, &small, 4);
        return {static_cast<uint16_t>(sign | (bits - 0x3f000000u))};
    }
    bits += 0xfffu + ((bits >> 13) & 1u);
    return {static_cast<uint16_t>(sign | ((bits >> 13) - (112u << 10)))};
}

/// Returns the smallest half-precision number >= `value` >= 0, infinity above 65504.
inline Half to_half_up(float value) {
    const Half nearest = float_to_half(value);
    return {static_cast<uint16_t>(nearest.bits + (half_to_float(nearest) < value))};
}

inline float from_bfloat16(uint16_t high) {
    const uint32_t bits = static_cast<uint32_t>(high) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

/// Returns 2^(exponent - 127).
inline float power_of_two(uint8_t exponent) {
    const uint32_t bits = exponent ? static_cast<uint32_t>(exponent) << 23 : 1u << 22;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

/// Returns the smallest bfloat16 number >= `value` >= 0.
inline uint16_t to_bfloat16_up(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>((bits + 0xffffu) >> 16);
}

}  // namespace
}  // namespace outpace

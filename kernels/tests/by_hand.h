// The noise of single tokens by its definition.
#pragma once

#include <cmath>
#include <cstdint>

namespace outpace {
namespace {

/// Computes noise as outpace/core/noise.py defines it: a hash of the token under the key's halves, then g = -log(-log(1
/// - v)).
inline double noise_of(int64_t token, uint64_t key) {
    auto bits = static_cast<uint32_t>(token) ^ static_cast<uint32_t>(key);
    for (const uint32_t factor : {0x7feb352du, 0x846ca68bu, 0x9e485565u}) {
        bits *= factor;
        bits ^= bits >> 15;
        if (factor == 0x7feb352du) bits ^= static_cast<uint32_t>(key >> 32);
    }
    const float half = static_cast<float>(bits & 0x7fffffffu) + 0.5f;
    const double v = half * static_cast<float>(std::ldexp(1 - std::ldexp(1.0, -23), -31));
    return -std::log(-std::log1p(-v));
}

}  // namespace
}  // namespace outpace

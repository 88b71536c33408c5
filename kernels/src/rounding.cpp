#include "rounding.h"

#include <cstring>

#include "half.h"

namespace outpace {
namespace {

constexpr int kNarrowings = 4;  // per end of a range
constexpr float kShare = 0.04f;  // cut off by each of them
constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: adding it rounds a small number to a whole one
constexpr int kHalfBlock = kRounded.inputs / 2;

struct Range {
    Half scale, minimum;
    float error;
};

/// Returns q of a weight before it is clamped to 0 .. 15.
float level_of(float weight, float minimum, float inverse) { return ((weight - minimum) * inverse + kWhole) - kWhole; }

/// Clamps; NaN becomes 0.
float cut(float level) { return level > 0.0f ? level < 15.0f ? level : 15.0f : 0.0f; }

float inverse_of(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

/// Returns the range from `low` to `high` with its squared error.
Range range_of(const float* weights, float low, float high) {
    const Half half_scale = float_to_half((high - low) / 15.0f), half_minimum = float_to_half(low);
    const float scale = half_to_float(half_scale), minimum = half_to_float(half_minimum), inverse = inverse_of(scale);
    float errors[kHalfBlock] = {};
    for (int i = 0; i < kRounded.inputs; i += kHalfBlock)
        for (int j = 0; j < kHalfBlock; ++j) {
            const float level = cut(level_of(weights[i + j], minimum, inverse));
            const float error = level * scale + minimum - weights[i + j];
            errors[j] = errors[j] + error * error;
        }
    float sum = 0.0f;
    for (const float error : errors) sum = sum + error;
    return {half_scale, half_minimum, sum};
}

Range best_range(const float* weights) {
    float low = weights[0], high = weights[0];
    for (int i = 1; i < kRounded.inputs; ++i) {
        low = weights[i] < low ? weights[i] : low;
        high = weights[i] > high ? weights[i] : high;
    }
    Range best = range_of(weights, low, high);
    for (int narrowing = 1; narrowing <= kNarrowings; ++narrowing) {
        const float share = 1.0f - kShare * static_cast<float>(narrowing);
        const float ends[][2] = {{low * share, high}, {low, high * share}, {low * share, high * share}};
        for (const auto& [from, to] : ends) {
            const Range range = range_of(weights, from, to);
            if (range.error < best.error) best = range;
        }
    }
    return best;
}

}  // namespace

void round_to_q4_1(const float* weights, int64_t count, uint8_t* blocks) {
    for (int64_t first = 0; first < count; first += kRounded.inputs, weights += kRounded.inputs, blocks += kRounded.bytes) {
        const Range range = best_range(weights);
        std::memcpy(blocks, &range.scale.bits, 2);
        std::memcpy(blocks + 2, &range.minimum.bits, 2);
        const float minimum = half_to_float(range.minimum), inverse = inverse_of(half_to_float(range.scale));
        uint8_t levels[kRounded.inputs];
        for (int i = 0; i < kRounded.inputs; ++i)
            levels[i] = static_cast<uint8_t>(cut(level_of(weights[i], minimum, inverse)));
        for (int i = 0; i < kHalfBlock; ++i) blocks[4 + i] = static_cast<uint8_t>(levels[i] | levels[i + kHalfBlock] << 4);
    }
}

}  // namespace outpace

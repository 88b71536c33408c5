// Sizes and plain views that every file of the native pass agrees on.
#pragma once

#include <cstdint>

namespace outpace {

constexpr int kGroup = 64;   // inputs that share one scale, in weights and in activations
constexpr int kLanes = 16;   // float32 or int32 numbers that are worked on at once, whatever the machine's registers
constexpr int kPanel = 32;   // outputs that are packed together: two times kLanes
constexpr int kDepthMax = 256;  // largest head size

// One group of one panel: a bfloat16 scale for each of 32 outputs, then kGroup / 4 steps of 32 outputs x 4 inputs.
constexpr int kBlockScales = kPanel * 2;
constexpr int kStep = kPanel * 4;
constexpr int kBlock = kBlockScales + kPanel * kGroup;

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

/// A number in IEEE half precision.
struct Half {
    uint16_t bits;
};

/// Rows of int8 activations: row r is `groups` groups of kGroup values, a scale and an offset for each group.
/// offset = -128 * (sum of the group's values): it takes back what weights stored as w + 128 add to a product.
struct Activations {
    int8_t* values;
    float* scales;
    int32_t* offsets;
    int groups;

    int8_t* row_values(int row) const { return values + static_cast<int64_t>(row) * groups * kGroup; }
    float* row_scales(int row) const { return scales + static_cast<int64_t>(row) * groups; }
    int32_t* row_offsets(int row) const { return offsets + static_cast<int64_t>(row) * groups; }
};

/// A packed weight matrix, see matrix.h.
struct Panels {
    const uint8_t* blocks;
    const float* bias;  // one an output, padded to whole panels; null where there is none
    int outputs;
    int groups;

    int count() const { return round_up(outputs, kPanel) / kPanel; }
    const uint8_t* panel(int number) const { return blocks + static_cast<int64_t>(number) * groups * kBlock; }
};

}  // namespace outpace

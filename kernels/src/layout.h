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

constexpr int kScaled = 32;  // entries of a key or value that share a scale where they are held in int8

/// How keys and values are held, see held.h.
enum class KvFormat { float32, float16, int8 };

/// A number in IEEE half precision.
struct Half {
    uint16_t bits;
};

constexpr int kSums = kGroup / kLanes;  // of a group's activations, one for each 16 of them
constexpr int kHalves = 2;              // of a group; weights of a file have a scale for 32 inputs, or for 16

/// What a product needs of a group of int8 activations beside its values. One stands beside the other: were each of these
/// numbers in an array of its own, threads that write neighbouring rows would take the arrays' lines from each other. Two
/// fill a line: with a third in part of it a pass of eight rows took 7 % longer.
struct GroupFacts {
    int32_t sums[kSums];    // of 16 values each
    float mins[kHalves];    // scale * (sum of 32 values): what a weight's smallest value is multiplied by
    float scales[kHalves];  // of 32 values each

    /// -128 * (sum of the values): it takes back what weights stored as w + 128 add to a product.
    int32_t offset() const { return -128 * (sums[0] + sums[1] + sums[2] + sums[3]); }
};

static_assert(sizeof(GroupFacts) == 32);

/// Rows of int8 activations: `groups` groups of kGroup values each. The same group of all rows lies together, so a product
/// of some rows finds all it needs at fixed distances. By halves: each half of a group is rounded by its own scale, which
/// products with a file's weights take at no cost, for they multiply by a scale for 32 inputs; else by the group's.
struct Activations {
    int8_t* values;
    GroupFacts* facts;
    int rows;
    int groups;
    bool by_halves = false;

    /// Group `group` of all rows from row `row` on.
    Activations from(int row, int group) const {
        const int64_t at = static_cast<int64_t>(group) * rows + row;
        return {values + at * kGroup, facts + at, rows, groups, by_halves};
    }

    /// Asks for the first row's lines, to be written soon: other cores, which read what they held, have to give them up.
    void claim() const {
        __builtin_prefetch(values, 1);
        __builtin_prefetch(facts, 1);
    }
};

/// How weights are held: rounded here (int8), or as a file has them, by ggml's names and two of ours (see formats.h).
/// The last three are a file's alone: they are rounded.
enum class Format { int8, q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, q4_k, q5_k, q6_k, u4_32, u4_64, f32, f16, bf16 };

constexpr bool is_float(Format format) { return format >= Format::f32; }

/// Panels of one format that follow each other, from panel `first` of a matrix on.
struct Section {
    Format format;
    int first;
    int64_t panel_bytes;
    const uint8_t* blocks;
};

/// A packed weight matrix, see matrix.h.
struct Panels {
    const Section* sections;
    int num_sections;
    const float* bias;  // one an output, padded to whole panels; null where there is none
    int outputs;
    int groups;

    int count() const { return round_up(outputs, kPanel) / kPanel; }
    const Section& section(int panel) const {
        int number = num_sections - 1;
        while (sections[number].first > panel) --number;
        return sections[number];
    }
    static const uint8_t* blocks(const Section& section, int panel) {
        return section.blocks + (panel - section.first) * section.panel_bytes;
    }
};

}  // namespace outpace

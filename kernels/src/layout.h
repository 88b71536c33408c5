// Sizes and plain views that every file of the native pass agrees on.
#pragma once

#include <cstdint>

namespace outpace {

constexpr int kArithmetic = 2;  // raised by whoever changes the bits of scores

constexpr int kGroup = 64;   // inputs that are worked on together
constexpr int kLanes = 16;   // float32 or int32 numbers that are worked on at once, whatever the machine's registers
constexpr int kPanel = 32;   // outputs that are packed together: two times kLanes
constexpr int kDepthMax = 256;  // largest head size

constexpr int kStep = kPanel * 4;  // bytes of a panel's outputs x 4 inputs, in a byte each

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

constexpr int kScaled = 32;  // entries of a key or value that share a scale where they are held in int8

/// How keys and values are held, see held.h.
enum class KvFormat { float32, float16, int8 };

/// A number in IEEE half precision.
struct Half {
    uint16_t bits;
};

constexpr int kHalves = 2;    // of a group; weights have a scale for 32 inputs,
constexpr int kQuarters = 4;  // or for 16

/// What a product needs of a group of int8 activations beside its values. One stands beside the other: were each of these
/// numbers in an array of its own, threads that write neighbouring rows would take the arrays' lines from each other. Two
/// fill a line: with a third in part of it a pass of eight rows took 7 % longer.
struct GroupFacts {
    int32_t sums[kQuarters];  // of 16 values each
    float numbers[kQuarters];  // four scales; or two, and behind them two minimums

    /// Of each quarter, where each is rounded by its own; else of each half.
    float* scales() { return numbers; }
    const float* scales() const { return numbers; }

    /// Of each half, and none by quarters: scale * (sum of 32 values), what a weight's smallest value is multiplied by.
    float* mins() { return numbers + kHalves; }
    const float* mins() const { return numbers + kHalves; }
};

static_assert(sizeof(GroupFacts) == 32 && 2 * kHalves == kQuarters);

/// Rows of int8 activations: `groups` groups of kGroup values each. The same group of all rows lies together, so a product
/// of some rows finds all it needs at fixed distances. Each half of a group is rounded by its own scale, which costs
/// products nothing, for they multiply by a weight's scale for 32 inputs; by quarters: each quarter is, for weights that
/// all have a scale for 16.
struct Activations {
    int8_t* values;
    GroupFacts* facts;
    int rows;
    int groups;
    bool by_quarters = false;

    /// Group `group` of all rows from row `row` on.
    Activations from(int row, int group) const {
        const int64_t at = static_cast<int64_t>(group) * rows + row;
        return {values + at * kGroup, facts + at, rows, groups, by_quarters};
    }

    /// Asks for the first row's lines, to be written soon: other cores, which read what they held, have to give them up.
    void claim() const {
        __builtin_prefetch(values, 1);
        __builtin_prefetch(facts, 1);
    }
};

/// How weights are held: as a file has them, by ggml's names and two of ours (see formats.h). The last three are a file's
/// alone: they are rounded to int8, which is Q8_0.
enum class Format { q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, q4_k, q5_k, q6_k, u4_32, u4_64, f32, f16, bf16 };

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

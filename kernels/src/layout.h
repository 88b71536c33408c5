// Sizes and plain views shared by all files of the native pass.
#pragma once

#include <cstdint>

namespace outpace {

constexpr int kArithmetic = 2;  // increase when a change affects the bits of logits

constexpr int kGroup = 64;  // inputs that are processed together
constexpr int kLanes = 16;  // float32 or int32 numbers that are processed at once, on every machine
constexpr int kPanel = 32;  // outputs that are packed together: two times kLanes
constexpr int kDepthMax = 512;  // largest head size

constexpr int kStep = kPanel * 4;  // bytes of a panel's outputs x 4 inputs, one byte each

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

constexpr int kScaled = 32;  // entries of a key or value that share a scale in int8

/// Storage formats of keys and values (kv_formats.h).
enum class KvFormat { float32, float16, int8 };

/// A number in IEEE half precision.
struct Half {
    uint16_t bits;
};

constexpr int kHalves = 2;  // of a group; weights have a scale for 32 inputs,
constexpr int kQuarters = 4;  // or for 16

/// Values that products need for a group of int8 activations. They are adjacent: if each were an array of its own,
/// threads that write neighbouring rows would share cache lines. Two fill a line; with a third value in part of it a
/// pass of eight rows took 7 % longer.
struct GroupFacts {
    int32_t sums[kQuarters];  // of 16 values each
    float numbers[kQuarters];  // four scales, or two scales followed by two minimums

    /// Scales of quarters if each is rounded separately, otherwise of halves.
    float* scales() { return numbers; }
    const float* scales() const { return numbers; }

    /// For each half, not with quarters: scale * (sum of 32 values), the factor of a weight's smallest value.
    float* mins() { return numbers + kHalves; }
    const float* mins() const { return numbers + kHalves; }
};

static_assert(sizeof(GroupFacts) == 32 && 2 * kHalves == kQuarters);

/// Rows of int8 activations: `groups` groups of kGroup values each. The same group of all rows is contiguous, so a
/// product of some rows finds its input at fixed distances. Each half of a group has its own scale, which costs
/// nothing, because products multiply by a weight's scale for 32 inputs. by_quarters: each quarter has one, for weights
/// that all have a scale for 16.
struct Activations {
    int8_t* values;
    GroupFacts* facts;
    int rows;
    int groups;
    bool by_quarters = false;

    /// Returns group `group` of all rows from `row` on.
    Activations from(int row, int group) const {
        const int64_t at = static_cast<int64_t>(group) * rows + row;
        return {values + at * kGroup, facts + at, rows, groups, by_quarters};
    }

    /// Prefetches the first row's lines for writing, because other cores that read them hold copies.
    void prefetch_for_write() const {
        __builtin_prefetch(values, 1);
        __builtin_prefetch(facts, 1);
    }
};

/// Formats of weights, by ggml's names and two of ours (formats.h). The last three occur in files only; they are
/// rounded to int8, which is Q8_0.
enum class Format { q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, mxfp4, q4_k, q5_k, q6_k, u4_32, u4_64, f32, f16, bf16 };

constexpr bool is_float(Format format) { return format >= Format::f32; }

/// Consecutive panels of one format, starting with panel `first` of a matrix.
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
    const float* bias;  // one per output, padded to whole panels, or null
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

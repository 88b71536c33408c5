// Blocks of a file's tensors, repacked in panels with the same numbers; floats are rounded to int8 panels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "file_blocks.h"
#include "formats.h"

namespace outpace {

/// Rows of one tensor in the file.
struct StoredRows {
    Format format;
    const uint8_t* data;
    int64_t rows;
    int64_t row_bytes;
};

/// A matrix made of rows of tensors. Output i is row rows[i] of the concatenated parts, zeros if negative. All outputs
/// of a panel have one format; a matrix of floats has one format. If `chunk` is not 0, each `chunk` inputs are padded
/// to whole groups.
struct Stored {
    std::vector<StoredRows> parts;
    const int* rows;
    int outputs;
    int inputs;  // with padding
    int chunk;

    /// Whether all of it is int8 in the file.
    bool is_int8() const {
        return std::all_of(parts.begin(), parts.end(), [](const auto& part) { return part.format == Format::q8_0; });
    }

    /// Whether it is all floats.
    bool has_floats() const { return !parts.empty() && is_float(parts[0].format); }

    /// Position of input `input` in a row of the file, and the number of consecutive inputs from there; none for
    /// padding.
    struct Run {
        int first, count;
    };
    Run run_at(int input) const {
        if (!chunk) return {input, inputs - input};
        const int padded = round_up(chunk, kGroup);
        return {input / padded * chunk + input % padded, chunk - input % padded};
    }

    /// Inputs without padding.
    int file_inputs() const { return chunk ? inputs / round_up(chunk, kGroup) * chunk : inputs; }

    /// Returns the row of output i and its format, null for zeros.
    const uint8_t* find(int output, Format* format) const;

    /// Throws std::invalid_argument.
    void check() const;
};

/// Returns the format of a name such as ggml's "Q4_1". Throws std::invalid_argument for others.
Format format_of(const char* name);
const char* name_of(Format format);

/// Bytes of one panel.
int64_t panel_bytes(Format format, int groups);

/// Packs group `group` of lane `lane` of a panel from a row of the file; `row` null: zeros. Returns false if a scale is
/// not finite.
bool pack_stored(Format format, const uint8_t* row, const Stored& stored, uint8_t* panel, int group, int lane);

/// Packs panel `number` of a file's matrix; floats, and blocks of other formats than `format`, are rounded to int8.
/// Returns what is wrong with the numbers, or null.
const char* pack_panel(const Stored& stored, Format format, int number, uint8_t* panel);

/// Reads a whole row of a file's tensor as float32, in whole groups.
void read_row(Format format, const uint8_t* row, int inputs, float* out);

/// Whether products with this format take activations rounded by quarters of groups.
bool takes_quarters(Format format);

/// Packs kGroup floats as group `group` of lane `lane` of a Q8_0 panel. For each 32: scale = (largest |x| / 127)
/// rounded up to half precision, q = round(x / scale). Returns false if a scale exceeds half precision.
bool pack_floats(const float* weights, uint8_t* panel, int group, int lane);

/// Whether all of these are finite.
bool are_finite(const float* x, int count);

/// Reads group `group` of a row of floats as float32 [kGroup]; `out` is unchanged where the group is padded.
void read_floats(Format format, const uint8_t* row, const Stored& stored, int group, float* out);

/// Dequantizes a group of one lane, float32 [kGroup].
void read_stored(Format format, const uint8_t* panel, int group, int lane, float* out);

}  // namespace outpace

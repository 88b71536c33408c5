// The blocks of a file's tensors, and the same numbers in panels; floats in panels of int8.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "file_blocks.h"
#include "formats.h"

namespace outpace {

/// Rows of one tensor, as the file has them.
struct StoredRows {
    Format format;
    const uint8_t* data;
    int64_t rows;
    int64_t row_bytes;
};

/// A matrix made of rows of tensors. Output i is row rows[i] of all parts' rows one behind the other, zeros below 0. All
/// outputs of a panel have one format; floats, which are rounded, are of one for the whole matrix. Where `chunk` is not 0,
/// so many inputs each are padded to whole groups.
struct Stored {
    std::vector<StoredRows> parts;
    const int* rows;
    int outputs;
    int inputs;  // padded ones included
    int chunk;

    /// Whether all of it is in int8 as the file has it.
    bool is_int8() const {
        return std::all_of(parts.begin(), parts.end(), [](const auto& part) { return part.format == Format::q8_0; });
    }

    /// Whether it is all floats.
    bool has_floats() const { return !parts.empty() && is_float(parts[0].format); }

    /// Where input `input` of a row stands in the file, and how many of the file's follow each other from there; none where
    /// it is padded.
    struct Run {
        int first, count;
    };
    Run run_at(int input) const {
        if (!chunk) return {input, inputs - input};
        const int room = round_up(chunk, kGroup);
        return {input / room * chunk + input % room, chunk - input % room};
    }

    /// The inputs that the file has.
    int file_inputs() const { return chunk ? inputs / round_up(chunk, kGroup) * chunk : inputs; }

    /// Where output i stands, and its format; null for zeros.
    const uint8_t* find(int output, Format* format) const;

    /// Throws std::invalid_argument.
    void check() const;
};

/// What a name means, as ggml's "Q4_1". Throws std::invalid_argument for others.
Format format_of(const char* name);
const char* name_of(Format format);

/// Bytes of one panel.
int64_t panel_bytes(Format format, int groups);

/// Group `group` of lane `lane` of a panel from a row of the file; `row` null: zeros. False where a scale is not finite.
bool pack_stored(Format format, const uint8_t* row, const Stored& stored, uint8_t* panel, int group, int lane);

/// kGroup floats as group `group` of lane `lane` of a panel of Q8_0. Of 32 of them: scale = (largest |x| / 127) rounded up
/// to half precision, q = round(x / scale). False where a scale is beyond half precision.
bool pack_floats(const float* weights, uint8_t* panel, int group, int lane);

/// Whether none of these is infinite or no number.
bool are_finite(const float* x, int count);

/// Group `group` of a row of floats, float32 [kGroup]; `out` stays as it is where the group is padded.
void read_floats(Format format, const uint8_t* row, const Stored& stored, int group, float* out);

/// The values of a group of one lane, float32 [kGroup].
void read_stored(Format format, const uint8_t* panel, int group, int lane, float* out);

}  // namespace outpace

// Formats of files: names, and the inputs and bytes of a block.
#pragma once

#include <stdexcept>

#include "layout.h"

namespace outpace {

/// Inputs and bytes of one block of a file.
struct FileBlock {
    int inputs;
    int bytes;
};

struct FileFormat {
    Format format;
    const char* name;
    FileBlock block;
};

inline constexpr FileFormat kFileFormats[] = {
    {Format::q4_0, "Q4_0", {32, 18}},   {Format::q4_1, "Q4_1", {32, 20}},   {Format::q5_0, "Q5_0", {32, 22}},
    {Format::q5_1, "Q5_1", {32, 24}},   {Format::q8_0, "Q8_0", {32, 34}},   {Format::iq4_nl, "IQ4_NL", {32, 18}},
    {Format::mxfp4, "MXFP4", {32, 17}},
    {Format::q4_k, "Q4_K", {256, 144}}, {Format::q5_k, "Q5_K", {256, 176}}, {Format::q6_k, "Q6_K", {256, 210}},
    {Format::u4_32, "U4_32", {32, 20}}, {Format::u4_64, "U4_64", {64, 36}}, {Format::f32, "F32", {1, 4}},
    {Format::f16, "F16", {1, 2}},       {Format::bf16, "BF16", {1, 2}},
};

constexpr const FileFormat& file_format(Format format) {
    for (const FileFormat& candidate : kFileFormats)
        if (candidate.format == format) return candidate;
    throw std::invalid_argument("not a format of a file");
}

constexpr FileBlock file_block(Format format) { return file_format(format).block; }

}  // namespace outpace

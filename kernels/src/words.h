// GPTQ and AWQ matrices in 4 bits, converted to blocks that panels are packed from.
#pragma once

#include <cstdint>

#include "layout.h"

namespace outpace {

/// A matrix in 32-bit words of eight nibbles. A weight is scale * (q - zero); groups of neighbouring inputs share scale
/// and zero.
struct Words {
    const uint32_t* weights;  // [inputs / 8, outputs], or by output [inputs, outputs / 8]
    const uint32_t* zeros;    // [groups, outputs / 8]
    const uint16_t* scales;  // [groups, outputs], half precision
    int outputs;              // a multiple of 8
    int inputs;  // a multiple of a block's
    int group;  // inputs; a multiple of a block's unless it is all of them
    bool by_output;  // AWQ: a word holds eight outputs in its own order, also of zeros
    int first_zero;  // meaning of a stored zero of 0
};

/// Converts all rows to blocks of u4_32 or u4_64 without rounding. `out` [outputs, bytes of a row].
void blocks_of_words(const Words& words, Format format, uint8_t* out);

}  // namespace outpace

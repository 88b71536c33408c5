// Matrices by GPTQ and AWQ in 4 bits, as their files have them, in blocks that panels are packed from.
#pragma once

#include <cstdint>

#include "layout.h"

namespace outpace {

/// A matrix in 32-bit words of eight nibbles. A weight is scale * (q - zero), scale and zero those of its group of
/// neighbouring inputs.
struct Words {
    const uint32_t* weights;  // [inputs / 8, outputs], or by output [inputs, outputs / 8]
    const uint32_t* zeros;    // [groups, outputs / 8]
    const uint16_t* scales;   // [groups, outputs], half precision
    int outputs;              // a multiple of 8
    int inputs;               // a multiple of a block's
    int group;                // inputs, a multiple of a block's unless it is all of them
    bool by_output;           // as AWQ has them: a word holds eight outputs, in an order of its own, also of zeros
    int first_zero;           // what a stored zero of 0 means
};

/// All rows' blocks in one of the formats u4_32 and u4_64, no number rounded. `out` [outputs, bytes of a row].
void blocks_of_words(const Words& words, Format format, uint8_t* out);

}  // namespace outpace

// Floats to four bits, as ggml's Q4_1 holds them.
#pragma once

#include <cstdint>

#include "file_blocks.h"

namespace outpace {

/// Its inputs share a scale c and a smallest value m: weight = c q + m, q from 0 to 15. Its bytes are c and m in half
/// precision, then q of input i beside that of input i + 16.
constexpr FileBlock kRounded = file_block(Format::q4_1);

/// One row of `count` weights, a multiple of a block's inputs, into its blocks. Of some ranges, the whole one and narrower ones
/// at either end or both, that with the least sum of squared errors is taken; outliers are cut off where that helps.
void round_to_q4_1(const float* weights, int64_t count, uint8_t* blocks);

}  // namespace outpace

// Floats to four bits, as ggml's Q4_1 holds them.
#pragma once

#include <cstdint>

#include "file_blocks.h"

namespace outpace {

/// Inputs of a block share a scale c and a minimum m: weight = c q + m, q from 0 to 15. Its bytes are c and m in half
/// precision, then the q of inputs i and i + 16 in one byte each.
constexpr FileBlock kRounded = file_block(Format::q4_1);

/// Rounds one row of `count` weights, a multiple of a block's inputs. Among the whole range and narrower ones it takes
/// that with the least sum of squared errors; outliers are clamped if that helps.
void round_to_q4_1(const float* weights, int64_t count, uint8_t* blocks);

}  // namespace outpace

// Floats to four bits, as ggml's Q4_1 holds them.
#pragma once

#include <cstdint>

namespace outpace {

constexpr int kBlockInputs = 32;  // that share a scale c and a smallest value m: weight = c q + m, q from 0 to 15
constexpr int kBlockBytes = 20;   // c and m in half precision, then input i beside input i + 16

/// One row of `count` weights, a multiple of kBlockInputs, into its blocks. Of some ranges, the whole one and narrower ones
/// at either end or both, that with the least sum of squared errors is taken; outliers are cut off where that helps.
void round_to_q4_1(const float* weights, int64_t count, uint8_t* blocks);

}  // namespace outpace

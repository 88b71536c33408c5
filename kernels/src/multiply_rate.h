// How fast these lanes multiply bytes in registers: the bound of all products. Include after a lanes_*.h.
#pragma once

#include "formats.h"
#include "kernels.h"

namespace outpace {
namespace {

/// Runs independent sums of products, `rounds` times; returns the number of products. out [kMeasuredSums] keeps the sums.
int64_t multiply_only(int rounds, float* out) {
    constexpr int kSums = kTileRows * kTileVectors > 4 ? kTileRows * kTileVectors : 4;  // enough to hide latency
    static_assert(kSums * kLanes <= kMeasuredSums);
    const uint8_t weight_bytes[kLanes * 4] = {1};
    const int8_t four[4] = {1, 2, 3, 4};
    const Weights weights = Weights::load(weight_bytes);
    const Quad activations = Quad::load(four);
    Ints sums[kSums];
    for (int i = 0; i < kSums; ++i) sums[i] = Ints::all(i);
    for (int round = 0; round < rounds; ++round)
        for (int i = 0; i < kSums; ++i) sums[i] = dot(sums[i], weights, activations);
    for (int i = 0; i < kSums; ++i) sums[i].to_floats().store(out + i * kLanes);
    return int64_t{rounds} * kSums * kLanes * 4;
}

}  // namespace
}  // namespace outpace

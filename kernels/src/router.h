// What chooses the experts of a row.
#pragma once

#include <vector>

#include "layout.h"
#include "memory.h"

namespace outpace {

constexpr int kUsedMax = 64;  // experts of a row

/// Chooses a row's experts by scores, which are products in float32 with its normalized state.
struct Router {
    int experts;
    int used;  // by each row
    int inputs;
    bool is_sigmoid = false;  // scores become sigmoids, else their softmax
    bool norms = false;  // weights are divided by their sum plus `epsilon`
    float epsilon = 0.0f;
    float scale = 1.0f;  // factor of the weights
    bool gates_shared = false;  // one more row of the matrix is the gate of the shared expert
    Block<float> weights{};  // [vectors(), inputs, kLanes]
    std::vector<float> bias{};  // [experts], added to scores; may be empty
    std::vector<float> correction{};  // [experts], counts in the choice, not in the weights; may be empty

    std::vector<float> scales{};  // [experts], factors of their weights; may be empty

    int rows() const { return experts + gates_shared; }
    int vectors() const { return round_up(rows(), kLanes) / kLanes; }
    int stride() const { return vectors() * kLanes; }
    int shares() const { return used + 1; }  // weights of a row: of its experts, and of the shared one

    /// Takes the matrix [rows(), inputs].
    void set_weights(const float* matrix);
};

}  // namespace outpace

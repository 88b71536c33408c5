// Ranking with keyed noise: the numbers of outpace/core/noise.py.
#pragma once

#include <cmath>
#include <cstdint>

#include "proposals.h"

namespace outpace {

/// The noise of one request. Without a temperature there is none, and rows are ranked by their logits.
struct Noise {
    double temperature;
    uint64_t seed, choice;
    Filters filters = {0, 1.0, 0.0};

    bool is_there() const { return temperature > 0.0; }

    /// Returns the key of the row that decides the token at this position (splitmix64's mixer, once per part).
    uint64_t key(uint64_t position) const {
        uint64_t key = 0;
        for (uint64_t part : {seed, choice, position, uint64_t{0}}) {
            key += part + 0x9e3779b97f4a7c15u;
            key = (key ^ key >> 30) * 0xbf58476d1ce4e5b9u;
            key = (key ^ key >> 27) * 0x94d049bb133111ebu;
            key ^= key >> 31;
        }
        return key;
    }
};

/// Whether the first of a row's two best tokens, by x / T + noise, also wins in the arithmetic that defines the noise.
inline bool is_clear(const Proposals& best) {
    const double margin = 1e-4 + 2e-6 * (std::fabs(best.values[0]) + 22.2);
    return margin < 1.0 && (best.values.size() == 1 || best.values[0] > best.values[1] + margin);
}

}  // namespace outpace

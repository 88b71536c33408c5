// The best tokens of a row of scores.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "tree.h"

namespace outpace {

/// Returns the best `count` tokens of a row, or none if it has no order.
inline Proposals best_of(const Kernels& kernels, const Ranking& task, int count) {
    std::vector<Ranked> best(std::min(count, task.size));
    best.resize(kernels.rank(task, static_cast<int>(best.size()), best.data()));
    Proposals found;
    for (const Ranked& ranked : best) {
        found.tokens.push_back(ranked.token);
        found.values.push_back(ranked.value);
    }
    return found;
}

}  // namespace outpace

// Measures whether passes of one or two rows should prefetch weights.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

#include "kernels.h"

namespace outpace {

/// With prefetches such passes take down to 0.75 of their time on AMD's processors; on Intel's 0.78 on one generation
/// and more than 1 on another. For unknown processors the layers of the first passes of one row alternate
/// between both, and the variant with the smaller median is kept. The results have the same bits.
class FetchTrial {
  public:
    static constexpr int kFewRows = 2;

    explicit FetchTrial(PrefetchPolicy known) : is_open_(!known.few_prefetch) {}

    /// Call before each pass, while no other work runs: ends the trial once enough is known.
    void begin_pass() {
        if (!is_open_) return;
        ++passes_;
        if (std::min(times_[0].size(), times_[1].size()) < kEnough) return;
        is_open_ = false;
        prefetches_ = median(times_[1]) < median(times_[0]);
    }

    bool prefetches(int layer) const { return is_open_ ? is_odd(layer) : prefetches_; }

    /// Whether to time the layers of a pass with this number of rows.
    bool wants(int rows) const { return is_open_ && rows == 1; }

    void note(int layer, std::chrono::steady_clock::duration time) { times_[is_odd(layer)].push_back(time.count()); }

  private:
    static constexpr std::size_t kEnough = 60;

    bool is_odd(int layer) const { return (layer + passes_) % 2 == 1; }
    static int64_t median(std::vector<int64_t>& times) {
        const auto middle = times.begin() + times.size() / 2;
        std::nth_element(times.begin(), middle, times.end());
        return *middle;
    }

    bool is_open_, prefetches_ = true;
    int passes_ = 0;
    std::vector<int64_t> times_[2];  // without and with prefetches
};

}  // namespace outpace

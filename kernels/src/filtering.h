// The best tokens of a row after top-k, top-p and min-p, as outpace/core/sampling.py defines them. Include after
// ranking.h.
//
// That definition sums in float32 in its own order. Tokens so close to the border that its result may differ are marked
// as uncertain.
#pragma once

#include <algorithm>
#include <vector>

#include "ranking.h"

namespace outpace {
namespace {

/// A token that may remain: its index in the row, and y = x / temperature.
struct Possible {
    int place;
    float y;
};

/// Numbers of tokens, in descending order, that remain: by the sums here, certainly, and at most.
struct Border {
    int sure, left, most;

    void cut(const Border& other) {
        sure = std::min(sure, other.sure);
        left = std::min(left, other.left);
        most = std::min(most, other.most);
    }
};

constexpr double kDoubt = 1e-4;  // relative; near 0, two sums of a row's probabilities differ by less
constexpr double kCoarse = 2.5e-7;  // more for each 1 of the largest |y|, because logarithms are coarse there
constexpr float kReaches[] = {10.0f, 40.0f, kInfinity};  // distances below the largest y
constexpr int kBins = 64;
constexpr float kFar = 256.0f;  // from here on neighbouring float32 values differ by 3e-5

/// Collects the tokens whose y is at least `least`.
inline void gather(const Ranking& task, float least, std::vector<Possible>& found) {
    alignas(64) float room[kStretch], y[kStretch];
    const auto temperature = static_cast<float>(task.temperature);
    found.clear();
    for (int first = 0; first < task.held; first += kStretch) {
        const float* x = stretch(task, first, room);
        Floats most = Floats::all(-kInfinity);
        for (int i = 0; i < kStretch; ++i) y[i] = x[i] / temperature;
        for (int i = 0; i < kStretch; i += kLanes) most = max(most, Floats::load(y + i));
        if (largest(most) < least) continue;
        for (int i = 0; i < kStretch; ++i)
            if (y[i] >= least && y[i] > -kInfinity) found.push_back({first + i, y[i]});
    }
}

/// Sorts descending, equal ones by index.
inline void sort(std::vector<Possible>& found) {
    std::sort(found.begin(), found.end(), [](const Possible& a, const Possible& b) {
        return a.y > b.y || (a.y == b.y && a.place < b.place);
    });
}

/// Keeps the `count` largest tokens and their equals, which is faster than sorting all.
inline void keep_largest(std::vector<Possible>& found, int count) {
    if (count >= static_cast<int>(found.size())) return;
    const auto last = found.begin() + (count - 1);
    std::nth_element(found.begin(), last, found.end(), [](const Possible& a, const Possible& b) { return a.y > b.y; });
    const float least = last->y;
    found.erase(std::remove_if(found.begin(), found.end(), [&](const Possible& one) { return one.y < least; }),
                found.end());
}

/// Drops tokens below the largest ones whose probabilities, relative to the largest, sum to `mass`, in whole bins of y.
/// Returns false if all of them do not sum to it.
inline bool narrow(std::vector<Possible>& found, float peak, float reach, double mass) {
    const float scale = kBins / reach;
    const auto bin = [&](float y) { return std::min(static_cast<int>((peak - y) * scale), kBins - 1); };
    double masses[kBins] = {};
    for (const Possible& one : found) masses[bin(one.y)] += __builtin_exp(static_cast<double>(one.y) - peak);
    int last = 0;
    for (; last < kBins; ++last)
        if ((mass -= masses[last]) <= 0.0) break;
    if (last == kBins) return false;
    found.erase(std::remove_if(found.begin(), found.end(), [&](const Possible& one) { return bin(one.y) > last; }),
                found.end());
    return true;
}

/// Returns `count` plus the number of tokens that equal the last one.
inline int with_equals(const std::vector<Possible>& found, int count) {
    while (count > 0 && count < static_cast<int>(found.size()) && found[count].y == found[count - 1].y) ++count;
    return count;
}

/// Sums the probabilities of the first `count` tokens relative to the largest.
inline double mass_of(const std::vector<Possible>& found, int count, float peak) {
    double mass = 0.0;
    for (int i = 0; i < count; ++i) mass += __builtin_exp(static_cast<double>(found[i].y) - peak);
    return mass;
}

/// Sums those of all tokens. Far from 0, where y is coarse in float32, the coarse y are summed.
inline double mass_of_row(const Ranking& task, float top, float peak, std::vector<Possible>& found) {
    if (__builtin_fabsf(peak) <= kFar)
        return __builtin_exp(log_of_sum(task, top, static_cast<float>(1.0 / task.temperature)));
    gather(task, -kInfinity, found);
    return mass_of(found, static_cast<int>(found.size()), peak);
}

/// Returns how many of the first `count` tokens top-p keeps if all of them sum to `whole` relative to the largest: up
/// to the first one with which the sum reaches its share. Sums may differ by `doubt` of the whole.
inline Border border_of_mass(const std::vector<Possible>& found, int count, double whole, double top_p, double doubt) {
    Border below{0, 0, 0};
    double mass = 0.0;
    for (int i = 0; i < count; ++i) {
        mass += __builtin_exp(static_cast<double>(found[i].y) - found[0].y) / whole;
        below.sure += mass < top_p - doubt;
        below.left += mass < top_p;
        below.most += mass < top_p + doubt;
    }
    const auto up_to = [&](int before) { return with_equals(found, std::min(before + 1, count)); };
    return {up_to(below.sure), up_to(below.left), up_to(below.most)};
}

/// Returns how many tokens min-p keeps: those with at least this y, which may differ by `doubt` in other arithmetic.
/// The largest always remains.
inline Border border_of_share(const std::vector<Possible>& found, float least, float doubt) {
    Border border{0, 0, 0};
    for (const Possible& one : found) {
        border.sure += one.y >= least + doubt || one.y == found[0].y;
        border.left += one.y >= least;
        border.most += one.y >= least - doubt;
    }
    return border;
}

/// Applies all filters to a row whose largest logit is `top`, collecting only as many tokens as needed.
inline Border border_of(const Ranking& task, float top, std::vector<Possible>& found) {
    const Filters& filters = task.filters;
    const float peak = top / static_cast<float>(task.temperature);
    const bool has_mass = filters.top_p < 1.0;
    const float least = filters.min_p > 0.0 ? peak + static_cast<float>(__builtin_log(filters.min_p)) : -kInfinity;
    const float near = 1e-6f * (1.0f + __builtin_fabsf(peak) + __builtin_fabsf(least));
    const double doubt = kDoubt + kCoarse * __builtin_fabsf(peak);
    const double whole_row = has_mass && !filters.top_k ? mass_of_row(task, top, peak, found) : 0.0;
    const bool is_bounded = !filters.top_k && !has_mass;  // min-p only
    for (float reach : kReaches) {
        gather(task, is_bounded ? least - near : peak - reach, found);
        if (is_bounded || reach == kInfinity) break;
        const double mass = (filters.top_p + 2 * doubt) * whole_row;
        if (filters.top_k ? static_cast<int>(found.size()) >= filters.top_k : narrow(found, peak, reach, mass)) break;
    }
    if (filters.top_k) keep_largest(found, filters.top_k);
    sort(found);
    const int count = static_cast<int>(found.size()), most = filters.top_k ? std::min(filters.top_k, count) : count;
    const int kept = with_equals(found, most);
    Border border{kept, kept, kept};
    if (has_mass) {
        const double whole = filters.top_k ? mass_of(found, most, peak) : whole_row;
        border.cut(border_of_mass(found, most, whole, filters.top_p, doubt));
    }
    if (filters.min_p > 0.0) border.cut(border_of_share(found, least, near));
    return border;
}

/// Does the same as `rank` with filters. Unless `whole`, a row also has no order if its best token may not remain.
int rank_filtered(const Ranking& task, int count, Ranked* best) {
    const float top = top_score(task);
    if (top == kInfinity || task.temperature < 1e-30 || !(__builtin_fabs(top / task.temperature) < 1e30)) return 0;
    std::vector<Possible> found;
    const Border border = border_of(task, top, found);
    const float peak = top / static_cast<float>(task.temperature);
    Podium podium{best, count};
    double sum = 0.0;
    int first = 0;  // index of the best
    for (int i = 0; i < (task.whole ? border.left : border.most); ++i) {
        const int place = found[i].place;
        const int64_t token = task.tokens ? task.tokens[place] : place;
        const double relative = static_cast<double>(found[i].y) - peak;
        const double value = task.key ? relative + noise(hash_of(static_cast<uint32_t>(token), *task.key)) : relative;
        sum += __builtin_exp(relative);
        if (value <= podium.floor()) continue;
        if (!podium.count || value > best[0].value) first = i;
        podium.add({token, value});
    }
    if (!task.whole && first >= border.sure) return 0;
    const double shift = task.whole ? -__builtin_log(sum) : peak;
    for (int i = 0; i < podium.count; ++i) best[i].value += shift;
    return podium.count;
}

}  // namespace
}  // namespace outpace

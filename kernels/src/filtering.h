// The best tokens of a row after top-k, top-p and min-p, as outpace/core/sampling.py defines them (which sums in float32,
// so that the last token that is kept may be another one). Include after ranking.h.
#pragma once

#include <algorithm>
#include <vector>

#include "ranking.h"

namespace outpace {
namespace {

/// A token that may remain: its index in the row, and y = x / temperature.
struct Candidate {
    int place;
    float y;
};

constexpr double kMargin = 1e-6;  // added to top-p, because tokens are first dropped by coarser sums
constexpr float kDistances[] = {10.0f, 40.0f, kInfinity};  // distances below the largest y
constexpr int kBins = 64;
constexpr float kFar = 256.0f;  // from here on neighbouring float32 values differ by 3e-5

/// Collects the tokens whose y is at least `threshold`.
inline void gather(const Ranking& task, float threshold, std::vector<Candidate>& found) {
    alignas(64) float buffer[kStretch], y[kStretch];
    const auto temperature = static_cast<float>(task.temperature);
    found.clear();
    for (int first = 0; first < task.size; first += kStretch) {
        const float* x = stretch(task, first, buffer);
        Floats highest = Floats::all(-kInfinity);
        for (int i = 0; i < kStretch; ++i) y[i] = x[i] / temperature;
        for (int i = 0; i < kStretch; i += kLanes) highest = max(highest, Floats::load(y + i));
        if (largest(highest) < threshold) continue;
        for (int i = 0; i < kStretch; ++i)
            if (y[i] >= threshold && y[i] > -kInfinity) found.push_back({first + i, y[i]});
    }
}

/// Sorts descending; tokens with equal y are in order of their index.
inline void sort(std::vector<Candidate>& found) {
    std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
        return a.y > b.y || (a.y == b.y && a.place < b.place);
    });
}

/// Keeps the `count` largest tokens and their equals, which is faster than sorting all.
inline void keep_largest(std::vector<Candidate>& found, int count) {
    if (count >= static_cast<int>(found.size())) return;
    const auto last = found.begin() + (count - 1);
    const auto is_larger = [](const Candidate& a, const Candidate& b) { return a.y > b.y; };
    std::nth_element(found.begin(), last, found.end(), is_larger);
    const float threshold = last->y;
    found.erase(std::remove_if(found.begin(), found.end(), [&](const Candidate& token) { return token.y < threshold; }),
                found.end());
}

/// Drops tokens below the largest ones whose probabilities, relative to the largest, sum to `mass`, in whole bins of y.
/// Returns false if all of them do not sum to it.
inline bool narrow(std::vector<Candidate>& found, float peak, float distance, double mass) {
    const float scale = kBins / distance;
    const auto bin = [&](float y) { return std::min(static_cast<int>((peak - y) * scale), kBins - 1); };
    double masses[kBins] = {};
    for (const Candidate& token : found) masses[bin(token.y)] += __builtin_exp(static_cast<double>(token.y) - peak);
    int last = 0;
    for (; last < kBins; ++last)
        if ((mass -= masses[last]) <= 0.0) break;
    if (last == kBins) return false;
    found.erase(std::remove_if(found.begin(), found.end(), [&](const Candidate& token) { return bin(token.y) > last; }),
                found.end());
    return true;
}

/// Returns `count` plus the number of tokens that equal the last one.
inline int with_equals(const std::vector<Candidate>& found, int count) {
    while (count > 0 && count < static_cast<int>(found.size()) && found[count].y == found[count - 1].y) ++count;
    return count;
}

/// Sums the probabilities of the first `count` tokens relative to the largest.
inline double mass_of(const std::vector<Candidate>& found, int count, float peak) {
    double mass = 0.0;
    for (int i = 0; i < count; ++i) mass += __builtin_exp(static_cast<double>(found[i].y) - peak);
    return mass;
}

/// Sums the probabilities of all tokens relative to the largest. Far from 0, where y is coarse in float32, the coarse y
/// are summed.
inline double mass_of_row(const Ranking& task, float top, float peak, std::vector<Candidate>& found) {
    if (__builtin_fabsf(peak) <= kFar)
        return __builtin_exp(log_of_sum(task, top, static_cast<float>(1.0 / task.temperature)));
    gather(task, -kInfinity, found);
    return mass_of(found, static_cast<int>(found.size()), peak);
}

/// Returns how many of the first `count` tokens top-p keeps if all of them sum to `whole` relative to the largest: up
/// to the first one with which the sum reaches its share.
inline int border_of_mass(const std::vector<Candidate>& found, int count, double whole, double top_p) {
    double mass = 0.0;
    int before = 0;
    for (; before < count; ++before)
        if ((mass += __builtin_exp(static_cast<double>(found[before].y) - found[0].y) / whole) >= top_p) break;
    return with_equals(found, std::min(before + 1, count));
}

/// Applies all filters to a row whose largest logit is `top`, collecting only as many tokens as needed. Returns how many
/// tokens of `found`, which are in descending order, remain.
inline int border_of(const Ranking& task, float top, std::vector<Candidate>& found) {
    const Filters& filters = task.filters;
    const float peak = top / static_cast<float>(task.temperature);
    const bool has_mass = filters.top_p < 1.0;
    const float threshold = filters.min_p > 0.0 ? peak + static_cast<float>(__builtin_log(filters.min_p)) : -kInfinity;
    const double whole_row = has_mass && !filters.top_k ? mass_of_row(task, top, peak, found) : 0.0;
    const bool is_bounded = !filters.top_k && !has_mass;  // min-p only
    for (float distance : kDistances) {
        gather(task, is_bounded ? threshold : peak - distance, found);
        if (is_bounded || distance == kInfinity) break;
        const double mass = (filters.top_p + kMargin) * whole_row;
        if (filters.top_k ? static_cast<int>(found.size()) >= filters.top_k : narrow(found, peak, distance, mass))
            break;
    }
    if (filters.top_k) keep_largest(found, filters.top_k);
    sort(found);
    const int count = static_cast<int>(found.size()), limit = filters.top_k ? std::min(filters.top_k, count) : count;
    int kept = with_equals(found, limit);
    if (has_mass) {
        const double whole = filters.top_k ? mass_of(found, limit, peak) : whole_row;
        kept = std::min(kept, border_of_mass(found, limit, whole, filters.top_p));
    }
    while (found[kept - 1].y < threshold) --kept;  // the largest is at least `threshold`
    return kept;
}

/// Does the same as `rank` with filters; the values are always those of `whole`.
int rank_filtered(const Ranking& task, int count, Ranked* best) {
    const float top = top_score(task);
    if (top == kInfinity || task.temperature < 1e-30 || !(__builtin_fabs(top / task.temperature) < 1e30)) return 0;
    std::vector<Candidate> found;
    const int kept = border_of(task, top, found);
    const float peak = top / static_cast<float>(task.temperature);
    TopTokens top_tokens{best, count};
    double sum = 0.0;
    for (int i = 0; i < kept; ++i) {
        const int64_t token = task.tokens ? task.tokens[found[i].place] : found[i].place;
        const double relative = static_cast<double>(found[i].y) - peak;
        const double value = task.key ? relative + noise(hash_of(static_cast<uint32_t>(token), *task.key)) : relative;
        sum += __builtin_exp(relative);
        if (value > top_tokens.floor()) top_tokens.insert({token, value});
    }
    for (int i = 0; i < top_tokens.count; ++i) best[i].value -= __builtin_log(sum);
    return top_tokens.count;
}

}  // namespace
}  // namespace outpace

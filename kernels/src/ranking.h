// The best tokens of a row, by logits or with keyed noise. Include after a lanes_*.h.
#pragma once

#include <algorithm>

#include "exponential.h"
#include "kernels.h"

namespace outpace {
namespace {

constexpr int kStretch = 64;  // logits processed together
constexpr float kInfinity = __builtin_inff();
constexpr float kLog2 = 0.69314718f;

/// Returns the logits from `first` on; those after the row's end are -inf, in `buffer`.
inline const float* stretch(const Ranking& task, int first, float* buffer) {
    const int count = task.size - first;
    if (count >= kStretch) return task.scores + first;
    for (int i = 0; i < kStretch; ++i) buffer[i] = i < count ? task.scores[first + i] : -kInfinity;
    return buffer;
}

/// Returns the largest logit, infinite for a row without order: one is NaN, or all are -inf.
inline float top_score(const Ranking& task) {
    constexpr int kChains = kStretch / kLanes;
    alignas(64) float buffer[kStretch];
    const Floats lowest = Floats::all(-__FLT_MAX__);
    Floats highest[kChains], check[kChains];
    for (int n = 0; n < kChains; ++n) highest[n] = lowest, check[n] = Floats::all(0.0f);
    for (int first = 0; first < task.size; first += kStretch) {
        const float* x = stretch(task, first, buffer);
        for (int n = 0; n < kChains; ++n) {
            const Floats part = max(lowest, Floats::load(x + n * kLanes));  // max keeps a NaN in its second argument
            check[n] = check[n] + part;
            highest[n] = max(highest[n], part);
        }
    }
    const float odd = sum(check[0] + check[1] + check[2] + check[3]);
    const float top = largest(max(max(highest[0], highest[1]), max(highest[2], highest[3])));
    return odd == odd && top > -__FLT_MAX__ ? top : kInfinity;
}

/// log(sum of e^((x - top) / temperature)), to 1e-6.
inline double log_of_sum(const Ranking& task, float top, float inverse) {
    alignas(64) float buffer[kStretch];
    const Floats shift = Floats::all(-top), scale = Floats::all(inverse);
    double total = 0.0;
    for (int first = 0; first < task.size; first += kStretch) {
        const float* x = stretch(task, first, buffer);
        Floats part = Floats::all(0.0f);
        for (int i = 0; i < kStretch; i += kLanes)
            part = part + exponential((Floats::load(x + i) + shift) * scale);
        total += sum(part);
    }
    return __builtin_log(total);
}

/// Returns the 31-bit hash of a token's noise, with the bits of outpace/core/noise.py.
inline uint32_t hash_of(uint32_t token, uint64_t key) {
    uint32_t bits = (token ^ static_cast<uint32_t>(key)) * 0x7feb352du;
    bits = (bits ^ bits >> 15 ^ static_cast<uint32_t>(key >> 32)) * 0x846ca68bu;
    bits = (bits ^ bits >> 15) * 0x9e485565u;
    return (bits ^ bits >> 15) & 0x7fffffffu;
}

/// Computes the hashes of a stretch.
inline void hash_stretch(const Ranking& task, int first, uint32_t* hashes) {
    const int count = task.size - first < kStretch ? task.size - first : kStretch;
    for (int i = 0; i < kStretch; ++i) hashes[i] = static_cast<uint32_t>(first + i);
    if (task.tokens)
        for (int i = 0; i < count; ++i) hashes[i] = static_cast<uint32_t>(task.tokens[first + i]);
    const uint64_t key = *task.key;
    for (int i = 0; i < kStretch; ++i) hashes[i] = hash_of(hashes[i], key);
}

/// Converts a hash to a number above 0.
inline float middle(uint32_t hash) { return static_cast<float>(static_cast<int32_t>(hash)) + 0.5f; }

/// Bounds the noise of a hash. With v = hash / 2^31, E = -log(1 - v) >= v, so g = -log E <= -log v; a float's bits,
/// read as a whole number, give a line in each octave that is below the logarithm.
inline float max_noise(uint32_t hash) {
    const auto bits = __builtin_bit_cast(int32_t, middle(hash));
    return (31 + 127) * kLog2 + 1e-3f - kLog2 * 0x1p-23f * static_cast<float>(bits);
}

/// Returns the noise of a hash, g = -log E.
inline double noise(uint32_t hash) {
    const float v = middle(hash) * (0x1p-31f * (1 - 0x1p-23f));
    return -__builtin_log(-__builtin_log1p(-static_cast<double>(v)));
}

/// The best tokens so far, descending, equal ones in order of arrival.
struct TopTokens {
    Ranked* places;
    int capacity;
    int count = 0;

    /// A value must exceed this to be among the best.
    double floor() const { return count < capacity ? -__builtin_inf() : places[capacity - 1].value; }
    void insert(Ranked token) {
        int at = count < capacity ? count++ : capacity - 1;
        for (; at && places[at - 1].value < token.value; --at) places[at] = places[at - 1];
        places[at] = token;
    }
};

/// Computes bounds on the values of a stretch relative to the row's top. Returns the largest.
inline float bounds_of(const float* x, const float* luck, float top, float scale, float* bounds) {
    Floats highest = Floats::all(-kInfinity);
    for (int i = 0; i < kStretch; i += kLanes) {
        const Floats part = fma(Floats::load(x + i) + Floats::all(-top), Floats::all(scale), Floats::load(luck + i));
        part.store(bounds + i);
        highest = max(highest, part);
    }
    return largest(highest);
}

/// Inserts values relative to the row's top; computes logarithms only if the bound exceeds the floor.
inline void insert_row(const Ranking& task, float top, float inverse, TopTokens& top_tokens) {
    alignas(64) float buffer[kStretch], bounds[kStretch], luck[kStretch] = {};
    alignas(64) uint32_t hashes[kStretch];
    const float scale = inverse * (1 - 1e-6f);  // x - top <= 0, so a smaller factor can only raise a bound
    for (int first = 0; first < task.size; first += kStretch) {
        const float* x = stretch(task, first, buffer);
        if (task.key) {
            hash_stretch(task, first, hashes);
            for (int i = 0; i < kStretch; ++i) luck[i] = max_noise(hashes[i]);
        }
        if (bounds_of(x, luck, top, scale, bounds) <= top_tokens.floor()) continue;
        for (int i = 0; i < kStretch; ++i) {
            if (bounds[i] <= top_tokens.floor()) continue;
            const double relative = (static_cast<double>(x[i]) - top) / task.temperature;
            const double value = task.key ? relative + noise(hashes[i]) : relative;
            if (value <= top_tokens.floor()) continue;
            top_tokens.insert({task.tokens ? task.tokens[first + i] : first + i, value});
        }
    }
}

/// Returns the index of the first largest logit.
inline int first_of(const Ranking& task, float top) {
    alignas(64) float buffer[kStretch];
    for (int first = 0;; first += kStretch) {
        const float* x = stretch(task, first, buffer);
        int found = 0;
        for (int i = 0; i < kStretch; ++i) found |= x[i] == top;
        if (found) return first + static_cast<int>(std::find(x, x + kStretch, top) - x);
    }
}

/// Does the same with filters (filtering.h).
int rank_filtered(const Ranking& task, int count, Ranked* best);

int rank(const Ranking& task, int count, Ranked* best) {
    if (task.filters.are_there()) return rank_filtered(task, count, best);
    const float top = top_score(task);
    if (top == kInfinity) return 0;
    if (count == 1 && !task.key && !task.whole) {
        const int place = first_of(task, top);
        *best = {task.tokens ? task.tokens[place] : place, top / task.temperature};
        return 1;
    }
    const auto inverse = static_cast<float>(task.temperature > 1e-30 ? 1.0 / task.temperature : 1e30);
    TopTokens top_tokens{best, count};
    insert_row(task, top, inverse, top_tokens);
    const double shift = task.whole ? -log_of_sum(task, top, inverse) : top / task.temperature;
    for (int i = 0; i < top_tokens.count; ++i) best[i].value += shift;
    return top_tokens.count;
}

}  // namespace
}  // namespace outpace

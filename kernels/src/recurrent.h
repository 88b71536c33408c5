// Gated delta nets (arXiv:2412.06464) and short convolutions. Include after a lanes_*.h and rowwise.h.
//
// A delta net's step, for each value head: S <- decay S; delta = beta (v - S' k); S <- S + k delta'; o = S' q. S' is
// the transpose of S. A node's delta and output are computed from its parent's state: with a = S' k and b = S' q
// before the step, delta = beta (v - decay a) and o = decay b + (k q) delta. So only nodes with children need a state of
// their own, and each column of the state is walked alone. Sums over the entries of a key are chains of fused
// multiply-adds in their order.
#pragma once

#include "exponential.h"
#include "recurrence.h"
#include "rowwise.h"

namespace outpace {
namespace {

/// log(1 + e^x) = max(x, 0) + log(1 + t) with t = e^-|x|, and log(1 + t) = 2 artanh(z) with z = t / (2 + t) <= 1 / 3.
inline Floats softplus(Floats x) {
    const Floats t = exponential(abs(x) * Floats::all(-1.0f));
    const Floats z = t / (Floats::all(2.0f) + t), square = z * z;
    Floats p = Floats::all(1.0f / 15);
    for (const float factor : {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f})
        p = fma(p, square, Floats::all(factor));
    return fma(z * Floats::all(2.0f), p, max(x, Floats::all(0.0f)));
}

/// Appends the accepted nodes' rows to the filter's history, in `count` channels from `first` on.
inline void fold_history(const Recur& task, const Sequence& sequence, int first, int count) {
    const Recurrence& sizes = task.sizes;
    const int kept = sizes.filter_length - 1, channels = sizes.channels;
    float* history = task.state(sequence) + sizes.value_heads * sizes.head_size() + first;
    for (int row = 0; sequence.folds && row < kept; ++row) {
        const int from = row + sequence.folds;
        const float* source = from < kept ? history + from * channels
                                          : task.stash(sequence, task.folds[sequence.first_fold + from - kept]) + first;
        for (int i = 0; i < count; ++i) history[row * channels + i] = source[i];
    }
}

/// Returns the row before the filter of the n-th last token before a row, n from 1 on.
inline const float* earlier_row(const Recur& task, const Sequence& sequence, int row, int n) {
    const Recurrence& sizes = task.sizes;
    const int place = task.earlier[row * (sizes.filter_length - 1) + n - 1];
    if (place >= 0) return task.stash(sequence, place);
    return task.state(sequence) + sizes.state_size() + static_cast<int64_t>(place) * sizes.channels;
}

/// Stashes `count` channels of all rows from `first` on, then filters them in place.
inline void filter_channels(const Recur& task, const Sequence& sequence, int first, int count) {
    const Recurrence& sizes = task.sizes;
    const int length = sizes.filter_length, end = sequence.first_row + sequence.rows;
    const bool is_delta_net = sizes.is_delta_net();
    for (int row = sequence.first_row; row < end; ++row) {
        const float* x = task.mixed + row * task.stride + first;
        float* to = task.stash(sequence, task.places[row]) + first;
        for (int i = 0; i < count; i += kLanes) {
            const Floats input = Floats::load(x + i);
            (is_delta_net ? input : input * Floats::load(x + 2 * sizes.channels + i)).store(to + i);
        }
    }
    for (int row = sequence.first_row; row < end; ++row) {
        float* x = task.mixed + row * task.stride + first;
        for (int i = 0; i < count; i += kLanes) {
            const float* weights = task.weights.filters.data() + first + i;
            Floats total = Floats::all(0.0f);
            for (int n = length - 1; n > 0; --n, weights += sizes.channels)
                total = fma(Floats::load(weights), Floats::load(earlier_row(task, sequence, row, n) + first + i), total);
            total = fma(Floats::load(weights), Floats::load(task.stash(sequence, task.places[row]) + first + i), total);
            (is_delta_net ? silu(total) : total * Floats::load(x + sizes.channels + i)).store(x + i);
        }
    }
}

/// A short convolution: filters a group of channels and rounds it.
inline void convolve(const Recur& task, const Sequence& sequence, int group) {
    const int first = group * kGroup, left = task.sizes.channels - first, count = left < kGroup ? left : kGroup;
    fold_history(task, sequence, first, count);
    if (task.folds_only) return;
    filter_channels(task, sequence, first, count);
    for (int row = sequence.first_row; row < sequence.first_row + sequence.rows; ++row) {
        alignas(64) float x[kGroup] = {};
        for (int i = 0; i < count; ++i) x[i] = task.mixed[row * task.stride + first + i];
        quantize_group(x, task.out, row, group);
    }
}

/// Divides a head by its length, times `scale`.
inline void normalize_length(float* x, int depth, float scale) {
    const Floats factor = Floats::all(1.0f / __builtin_sqrtf(sum_of_squares(x, depth) + 1e-6f) * scale);
    for (int i = 0; i < depth; i += kLanes) (Floats::load(x + i) * factor).store(x + i);
}

/// Filters a key head's channels in all rows. Stashes keys and decays; leaves strengths and k q in the gates' places.
inline void prepare_head(const Recur& task, const Sequence& sequence, int key_head) {
    const Recurrence& sizes = task.sizes;
    const int depth = sizes.key_depth, query_at = key_head * depth, key_at = sizes.key_width() + query_at;
    const auto value_at = [&](int head) { return 2 * sizes.key_width() + head * sizes.value_depth; };
    const auto for_ranges = [&](auto f) {
        f(query_at, depth);
        f(key_at, depth);
        for (int n = 0; n < sizes.shared(); ++n) f(value_at(sizes.value_head(key_head, n)), sizes.value_depth);
    };
    for_ranges([&](int first, int count) { fold_history(task, sequence, first, count); });
    if (task.folds_only) return;
    for_ranges([&](int first, int count) { filter_channels(task, sequence, first, count); });
    const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(depth));
    for (int row = sequence.first_row; row < sequence.first_row + sequence.rows; ++row) {
        float *x = task.mixed + row * task.stride, *query = x + query_at, *key = x + key_at;
        float *stashed = task.stash(sequence, task.places[row]), *kept = stashed + sizes.keys_at() + query_at;
        normalize_length(query, depth, scale);
        normalize_length(key, depth, 1.0f);
        Floats product = Floats::all(0.0f);
        for (int i = 0; i < depth; i += kLanes) {
            const Floats entries = Floats::load(key + i);
            entries.store(kept + i);
            product = fma(entries, Floats::load(query + i), product);
        }
        const float match = sum(product);
        for (int n = 0; n < sizes.shared(); ++n) {
            const int head = sizes.value_head(key_head, n);
            float *strength = x + sizes.inputs_end() + head, *step = strength + sizes.value_heads;
            const Floats time = softplus(Floats::all(*step + task.weights.time_bias[head]));
            stashed[sizes.decays_at() + head] = first_lane(exponential(time * Floats::all(task.weights.rates[head])));
            *strength = first_lane(sigmoid(Floats::all(*strength)));
            *step = match;
        }
    }
}

constexpr int kFolds = 4;  // nodes that are taken in together

/// A node that is taken in, in one value head.
struct Fold {
    float decay;
    const float *key, *delta;
};

/// A row that is computed from its parent's state, in one value head.
struct Probe {
    const float *key, *query;
    float decay, strength, match;
    float* value;  // becomes the output
    float* delta;
};

/// Takes `Folds` nodes in, one after the other, in V times 16 columns of a state, and computes a row from the result, if
/// `Probes`. A state is loaded and stored once for all of them.
template <int V, int Folds, bool Probes>
inline void walk_step(const float* from, float* to, int depth, const Fold* nodes, const Probe& row) {
    Floats by_key[V], by_query[V];
    for (int v = 0; v < V; ++v) by_key[v] = by_query[v] = Floats::all(0.0f);
    for (int i = 0; i < depth; ++i)
        for (int v = 0; v < V; ++v) {
            const int at = (v * depth + i) * kLanes;
            Floats entries = Floats::load(from + at);
            for (int n = 0; n < Folds; ++n) {
                const Fold& node = nodes[n];
                const Floats delta = Floats::load(node.delta + v * kLanes);
                entries = fma(Floats::all(node.key[i]), delta, entries * Floats::all(node.decay));
            }
            if constexpr (Folds > 0) entries.store(to + at);
            if constexpr (Probes) {
                by_key[v] = fma(Floats::all(row.key[i]), entries, by_key[v]);
                by_query[v] = fma(Floats::all(row.query[i]), entries, by_query[v]);
            }
        }
    if constexpr (Probes)
        for (int v = 0; v < V; ++v) {
            const Floats value = Floats::load(row.value + v * kLanes);
            const Floats delta = fma(by_key[v], Floats::all(-row.decay), value) * Floats::all(row.strength);
            delta.store(row.delta + v * kLanes);
            fma(Floats::all(row.match), delta, by_query[v] * Floats::all(row.decay)).store(row.value + v * kLanes);
        }
}

/// Walks a step with this number of nodes, at most `Folds`.
template <int V, bool Probes, int Folds = kFolds>
inline void walk_nodes(const float* from, float* to, int depth, const Fold* nodes, int count, const Probe& row) {
    if (count == Folds)
        walk_step<V, Folds, Probes>(from, to, depth, nodes, row);
    else if constexpr (Folds > 0)
        walk_nodes<V, Probes, Folds - 1>(from, to, depth, nodes, count, row);
}

/// Walks V times 16 columns of a value head, from `column` on. `states`: space for the walk's states.
template <int V>
inline void walk_columns(const Recur& task, const Sequence& sequence, int key_head, int head, int column,
                         float* states) {
    const Recurrence& sizes = task.sizes;
    const int depth = sizes.key_depth, query_at = key_head * depth, delta_at = head * sizes.value_depth + column;
    float* committed = task.state(sequence) + head * sizes.head_size() + column * depth;
    const auto state = [&](int number) { return number < 0 ? committed : states + number * V * kLanes * depth; };
    const WalkStep *step = task.steps + sequence.first_step, *end = step + sequence.steps;
    for (; step < end; ++step) {
        if (task.folds_only && (step->place < 0 || step->to >= 0)) return;
        const float* from = state(step->from);
        Fold nodes[kFolds];
        int count = 0;
        const auto take_in = [&] {
            const float* stashed = task.stash(sequence, step->place);
            nodes[count++] = {stashed[sizes.decays_at() + head], stashed + sizes.keys_at() + query_at,
                              stashed + sizes.deltas_at() + delta_at};
        };
        if (step->place >= 0) take_in();
        for (; step->row < 0 && count < kFolds && step + 1 < end && step[1].continues(*step); take_in()) ++step;
        if (step->row < 0 || task.folds_only) {
            walk_nodes<V, false>(from, state(step->to), depth, nodes, count, {});
            continue;
        }
        float *x = task.mixed + step->row * task.stride, *strength = x + sizes.inputs_end() + head;
        float* stashed = task.stash(sequence, task.places[step->row]);
        const Probe row{stashed + sizes.keys_at() + query_at, x + query_at, stashed[sizes.decays_at() + head],
                        strength[0], strength[sizes.value_heads], x + 2 * sizes.key_width() + delta_at,
                        stashed + sizes.deltas_at() + delta_at};
        walk_nodes<V, true>(from, state(step->to), depth, nodes, count, row);
    }
}

/// Norms a head's output, gates it and rounds it.
inline void finish_head(const Recur& task, int row, int head) {
    const Recurrence& sizes = task.sizes;
    const int depth = sizes.value_depth, groups = sizes.head_groups();
    const float* x = task.mixed + row * task.stride + 2 * sizes.key_width() + head * depth;
    const float* gate = task.mixed + row * task.stride + sizes.channels + head * depth;
    alignas(64) float out[kDepthMax] = {};
    const Floats inverse = Floats::all(inverse_rms(sum_of_squares(x, depth), depth, task.epsilon));
    for (int i = 0; i < depth; i += kLanes)
        (Floats::load(x + i) * inverse * Floats::load(task.weights.norm.data() + i) * silu(Floats::load(gate + i)))
            .store(out + i);
    for (int group = 0; group < groups; ++group)
        quantize_group(out + group * kGroup, task.out, row, head * groups + group);
}

void recur(const Recur& task, int unit, float* states) {
    const Recurrence& sizes = task.sizes;
    const Sequence& sequence = task.sequences[unit / sizes.units()];
    const int number = unit % sizes.units();
    if (!sizes.is_delta_net()) return convolve(task, sequence, number);
    prepare_head(task, sequence, number);
    for (int n = 0; n < sizes.shared(); ++n) {
        const int head = sizes.value_head(number, n);
        int column = 0;
        for (; column + kStateVectors * kLanes <= sizes.value_depth; column += kStateVectors * kLanes)
            walk_columns<kStateVectors>(task, sequence, number, head, column, states);
        for (; column < sizes.value_depth; column += kLanes)
            walk_columns<1>(task, sequence, number, head, column, states);
        if (task.folds_only) continue;
        for (int row = sequence.first_row; row < sequence.first_row + sequence.rows; ++row) finish_head(task, row, head);
    }
}

}  // namespace
}  // namespace outpace

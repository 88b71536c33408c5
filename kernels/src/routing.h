// Routing to experts and sums of their outputs. Include after a lanes_*.h.
#pragma once

#include "exponential.h"
#include "kernels.h"
#include "rowwise.h"

namespace outpace {
namespace {

constexpr int kScoredRows = 4;  // rows that share an expert's weights

template <int R>
inline void score_rows(const ScoreExperts& task, int vector, int first) {
    const Router& router = task.router;
    const float *weights = router.weights.data() + static_cast<int64_t>(vector) * router.inputs * kLanes, *x = task.x + first * task.stride;
    Floats total[R];
    for (int r = 0; r < R; ++r) total[r] = Floats::all(0.0f);
    for (int i = 0; i < router.inputs; ++i) {
        const Floats w = Floats::load(weights + static_cast<int64_t>(i) * kLanes);
        for (int r = 0; r < R; ++r) total[r] = fma(Floats::all(x[r * task.stride + i]), w, total[r]);
    }
    for (int r = 0; r < R; ++r) {
        if (!router.bias.empty()) total[r] = total[r] + Floats::load(router.bias.data() + vector * kLanes);
        total[r].store(task.scores + static_cast<int64_t>(first + r) * router.stride() + vector * kLanes);
    }
}

void score_experts(const ScoreExperts& task, int vector) {
    int first = 0;
    for (; first + kScoredRows <= task.rows; first += kScoredRows) score_rows<kScoredRows>(task, vector, first);
    for (; first < task.rows; ++first) score_rows<1>(task, vector, first);
}

/// Finds the experts with the largest scores, of equal ones the first; `chosen` rises. The library's sort would be
/// compiled for these lanes and might be linked into the others.
inline void choose_best(const Router& router, const float* scores, int* chosen) {
    float best[kUsedMax];
    int count = 0;
    for (int expert = 0; expert < router.experts; ++expert) {
        const float score = router.correction.empty() ? scores[expert] : scores[expert] + router.correction[expert];
        if (count == router.used && !(score > best[count - 1])) continue;
        int at = count < router.used ? count++ : count - 1;
        for (; at > 0 && score > best[at - 1]; --at) best[at] = best[at - 1], chosen[at] = chosen[at - 1];
        best[at] = score, chosen[at] = expert;
    }
    for (int n = 1; n < count; ++n)
        for (int at = n; at > 0 && chosen[at] < chosen[at - 1]; --at) {
            const int expert = chosen[at];
            chosen[at] = chosen[at - 1], chosen[at - 1] = expert;
        }
}

void choose_experts(const ChooseExperts& task, int row) {
    const Router& router = task.router;
    float* scores = task.scores + static_cast<int64_t>(row) * router.stride();
    int* chosen = task.chosen + static_cast<int64_t>(row) * router.used;
    float *weights = task.weights + static_cast<int64_t>(row) * router.shares(), inverse = 1.0f;
    weights[router.used] = router.gates_shared ? first_lane(sigmoid(Floats::all(scores[router.experts]))) : 1.0f;
    if (router.is_sigmoid)
        for (int i = 0; i < router.stride(); i += kLanes) sigmoid(Floats::load(scores + i)).store(scores + i);
    choose_best(router, scores, chosen);
    if (!router.is_sigmoid) inverse = exponentials(scores, router.experts);
    float total = 0.0f;
    for (int n = 0; n < router.used; ++n) {
        weights[n] = scores[chosen[n]] * inverse;
        total = total + weights[n];
    }
    for (int n = 0; n < router.used; ++n)
        weights[n] = (router.norms ? weights[n] / (total + router.epsilon) : weights[n]) * router.scale;
    for (int n = 0; n < router.used && !router.scales.empty(); ++n) weights[n] = weights[n] * router.scales[chosen[n]];
}

void join_embeddings(const JoinEmbeddings& task, int row) {
    constexpr float kHalf = 0.70710678f;
    const float* table = task.table + row * task.table_stride;
    float* x = task.x + static_cast<int64_t>(row) * task.layers * task.size;
    alignas(64) float padded[kEmbeddedMax] = {};
    for (int layer = 0; layer < task.layers; ++layer, x += task.size, table += task.size) {
        for (int i = 0; i < task.size; ++i) padded[i] = x[i] * task.scale;
        const float inverse = inverse_rms(sum_of_squares(padded, round_up(task.size, kLanes)), task.size, task.epsilon);
        for (int i = 0; i < task.size; ++i)
            x[i] = (padded[i] * inverse * task.norm[i] + table[i] * task.table_scale) * kHalf;
    }
}

void gate_row(const GateRow& task, int row) {
    const float *x = task.x + static_cast<int64_t>(row) * task.size, *by = task.by + row * task.stride;
    for (int group = 0; group < task.out.groups; ++group) {
        alignas(64) float gates[kGroup] = {}, factors[kGroup] = {};
        for (int i = 0; i < kGroup && group * kGroup + i < task.size; ++i)
            gates[i] = x[group * kGroup + i], factors[i] = by[group * kGroup + i];
        for (int i = 0; i < kGroup; i += kLanes) {
            const Floats gate = Floats::load(gates + i);
            ((task.gating == Gating::gelu ? gelu(gate) : silu(gate)) * Floats::load(factors + i)).store(gates + i);
        }
        quantize_group(gates, task.out, row, group);
    }
}

void cap_logits(const CapLogits& task, int unit) {
    const int row = unit / task.units_a_row(), first = unit % task.units_a_row() * kCapped;
    const int count = task.columns - first < kCapped ? task.columns - first : kCapped;
    cap_all(task.x + static_cast<int64_t>(row) * task.columns + first, count, task.cap);
}

void mix_experts(const MixExperts& task, int unit) {
    const int row = unit / task.units_a_row(), first = unit % task.units_a_row() * kMixed;
    const int end = first + kMixed < task.stride ? first + kMixed : task.stride;
    const int* pairs = task.pairs + static_cast<int64_t>(row) * task.used;
    const float* weights = task.weights + static_cast<int64_t>(row) * (task.used + 1);
    float* x = task.x + static_cast<int64_t>(row) * task.stride;
    for (int i = first; i < end; i += kLanes) {
        Floats total = Floats::all(0.0f);
        for (int n = 0; n < task.used; ++n)
            total = fma(Floats::all(weights[n]), Floats::load(task.outputs + static_cast<int64_t>(pairs[n]) * task.stride + i), total);
        if (task.shared)
            total = fma(Floats::all(weights[task.used]), Floats::load(task.shared + static_cast<int64_t>(row) * task.stride + i), total);
        (task.add ? Floats::load(x + i) + total : total).store(x + i);
    }
    for (int i = task.size > first ? task.size : first; i < end; ++i) x[i] = 0.0f;  // the outputs' padding is undefined
}

}  // namespace
}  // namespace outpace

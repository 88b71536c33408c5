// Work on rows: norms, rounding to int8, rotation. Include after a lanes_*.h.
#pragma once

#include "kv_formats.h"
#include "kernels.h"

namespace outpace {
namespace {

/// Stores 16 numbers of each as int8, and their sums. Lanes that do all at once have an overload, which is preferred.
template <class I>
inline void store_bytes(const I (&a)[kQuarters], int8_t* p, int32_t* sums) {
    for (int i = 0; i < kQuarters; ++i) {
        a[i].store_bytes(p + i * kLanes);
        sums[i] = sum(a[i]);
    }
}

/// Rounds kGroup floats to int8, each of `Parts` parts by its own scale = largest |x| / 127: q = round(x * (127 /
/// largest)).
template <int Parts>
inline void quantize_parts(const float* x, int8_t* values, GroupFacts& facts) {
    constexpr int kVectors = kQuarters / Parts;  // of a part
    static_assert(kGroup == kQuarters * kLanes && (Parts == kHalves || Parts == kQuarters));
    Ints q[kQuarters];
    for (int part = 0; part < Parts; ++part) {
        const float* from = x + part * kVectors * kLanes;
        Floats magnitudes = abs(Floats::load(from));
        if constexpr (kVectors > 1) magnitudes = max(magnitudes, abs(Floats::load(from + kLanes)));
        const float top = largest(magnitudes);
        const bool is_zero = !(top > 1e-30f);  // 127 / top must stay finite
        const Floats factor = Floats::all(is_zero ? 0.0f : 127.0f / top);
        for (int i = 0; i < kVectors; ++i) q[part * kVectors + i] = round(Floats::load(from + i * kLanes) * factor);
        facts.scales()[part] = is_zero ? 0.0f : top / 127.0f;
    }
    store_bytes(q, values, facts.sums);
    if constexpr (Parts == kHalves)
        for (int half = 0; half < kHalves; ++half)
            facts.mins()[half] = facts.scales()[half] * static_cast<float>(facts.sums[2 * half] + facts.sums[2 * half + 1]);
}

/// Rounds kGroup floats to group `group` of row `row`.
inline void quantize_group(const float* x, const Activations& out, int row, int group) {
    const Activations place = out.from(row, group);
    if (out.by_quarters)
        quantize_parts<kQuarters>(x, place.values, *place.facts);
    else
        quantize_parts<kHalves>(x, place.values, *place.facts);
}

/// Sums x_i^2 over a multiple of 16 numbers: lane l adds i = l, l + 16, ... in this order.
inline float sum_of_squares(const float* x, int count) {
    Floats total = Floats::all(0.0f);
    for (int i = 0; i < count; i += kLanes) {
        const Floats part = Floats::load(x + i);
        total = fma(part, part, total);
    }
    return sum(total);
}

inline float inverse_rms(float squares, int size, float epsilon) {
    return 1.0f / __builtin_sqrtf(squares / static_cast<float>(size) + epsilon);
}

void normalize(const Normalize& task, int row) {
    const int64_t source = task.rows ? task.rows[row] : row;
    const float* x = task.x + source * task.stride;
    for (int group = 0; group < task.out.groups; ++group) task.out.from(row, group).prefetch_for_write();
    if (!task.weight) {
        for (int group = 0; group < task.out.groups; ++group) quantize_group(x + group * kGroup, task.out, row, group);
        return;
    }
    const Floats inverse = Floats::all(inverse_rms(sum_of_squares(x, task.stride), task.size, task.epsilon));
    alignas(64) float normed[kGroup];
    for (int group = 0; group < task.out.groups; ++group) {
        for (int i = 0; i < kGroup; i += kLanes) {
            const int at = group * kGroup + i;
            (Floats::load(x + at) * inverse * Floats::load(task.weight + at)).store(normed + i);
        }
        quantize_group(normed, task.out, row, group);
        if (task.normed)
            for (int i = 0; i < kGroup; ++i) task.normed[static_cast<int64_t>(row) * task.stride + group * kGroup + i] = normed[i];
    }
}

void add_normed(const AddNormed& task, int row) {
    const int64_t at = static_cast<int64_t>(row) * task.stride;
    float *x = task.x + at, *branch = task.branch + at;
    for (int i = task.size; i < task.stride; ++i) branch[i] = 0.0f;
    const Floats scale = Floats::all(task.scale);
    const Floats inverse = Floats::all(inverse_rms(sum_of_squares(branch, task.stride), task.size, task.epsilon));
    for (int i = 0; i < task.stride; i += kLanes)
        ((Floats::load(x + i) + Floats::load(branch + i) * inverse * Floats::load(task.weight + i)) * scale).store(x + i);
}

void norm_rows(const NormRows& task, int row) {
    float* x = task.x + row * task.stride;
    const Floats inverse = Floats::all(inverse_rms(sum_of_squares(x, task.size), task.size, task.epsilon));
    for (int i = 0; i < task.size; i += kLanes)
        (Floats::load(x + i) * inverse * Floats::load(task.weight + i)).store(x + i);
}

/// Returns 1 / rms(x) of one head.
inline float inverse_of_head(const Heads& heads, const float* x) {
    alignas(64) float padded[kDepthMax];
    for (int i = 0; i < heads.width(); ++i) padded[i] = i < heads.depth ? x[i] : 0.0f;
    return inverse_rms(sum_of_squares(padded, heads.width()), heads.depth, heads.epsilon);
}

/// Processes one head: x / rms(x) * norm if there is a norm, then rotates the pairs (i, i + depth / 2), then scales.
inline void rotate_head(const Rotate& task, int row, const float* norm, float scale, float* x) {
    const int half = task.heads.depth / 2;
    if (norm) {
        const float inverse = inverse_of_head(task.heads, x);
        for (int i = 0; i < 2 * half; ++i) x[i] = x[i] * inverse * norm[i];
    }
    const float* pairs = task.rope_rows ? task.rope_rows + static_cast<int64_t>(row) * task.rope_stride : nullptr;
    for (int i = 0; i < half; ++i) {
        const float cosine = pairs ? pairs[2 * i] : 1.0f, sine = pairs ? pairs[2 * i + 1] : 0.0f;
        const float first = x[i], second = x[i + half];
        x[i] = __builtin_fmaf(first, cosine, -(second * sine)) * scale;
        x[i + half] = __builtin_fmaf(first, sine, second * cosine) * scale;
    }
}

void rotate(const Rotate& task, int unit) {
    const Heads& heads = task.heads;
    const int head = unit % task.units_a_block(), first = unit / task.units_a_block() * kRotateRows;
    const int end = first + kRotateRows < task.rows ? first + kRotateRows : task.rows;
    for (int row = first; row < end; ++row) {
        float* x = task.mixed + static_cast<int64_t>(row) * heads.outputs() + head * heads.depth;
        if (head < heads.queries) {
            rotate_head(task, row, task.query_norm, heads.scale, x);
        } else {
            const float* value = x + (heads.projected > 1 ? heads.keys * heads.depth : 0);
            alignas(64) float own[kDepthMax];
            if (heads.norms_values || heads.projected == 1) {
                const float inverse = heads.norms_values ? inverse_of_head(heads, value) : 1.0f;
                for (int i = 0; i < heads.depth; ++i) own[i] = value[i] * inverse;
                value = own;
            }
            rotate_head(task, row, task.key_norm, 1.0f, x);
            const KeyValues& store = task.spans[task.row_spans[row]];
            store_head(heads, store, head - heads.queries, task.slots[row], x, value);
        }
    }
}

}  // namespace
}  // namespace outpace

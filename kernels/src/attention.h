// Attention over keys in position order. Include after a lanes_*.h and rowwise.h.
//
// score[p] = q . k[p], a chain of fused multiply-adds over the entries of the head, or cap tanh(score[p] / cap) of it
// weight[p] = e^(score[p] - largest)
// out = (sum over positions p of weight[p] v[p]) / (sum of weights), a chain over p for every entry.
//
// Scores are computed by slot, 16 at once, also for slots that a row does not see; then the scores of visible slots are
// compacted in position order. So the result does not depend on the slot of an ancestor.
#pragma once

#include "exponential.h"
#include "kv_formats.h"
#include "kernels.h"
#include "rowwise.h"

namespace outpace {
namespace {

/// One query of a tile: its head's entries, the slots that its row sees, its scores, and where its result goes.
struct Query {
    const float* entries;  // [depth]
    VisibleSlots visible;
    float* scores;  // by slot from the tile's first slot on, later in position order
    float inverse;  // 1 / sum of weights
    const float* sink;  // a score without a value, or null
    int before, after;  // slots that it sees before and after the slots that all queries of the tile see
};

/// Slots that all queries of a tile see, and the first of the tile's whole blocks.
struct Common {
    int begin, end;
    int base;
};

/// Computes scores of Q queries with the keys of `blocks` times 32 slots. `fetches`: prefetch the next keys and the
/// values of these slots.
template <class K, int Q>
inline void score_keys(const uint8_t* keys, const uint8_t* values, const Heads& heads, int blocks, bool fetches,
                       Query* queries) {
    const int depth = heads.depth;
    const int64_t size = static_cast<int64_t>(heads.key_bytes()) * kLanes;
    const int share = 2 * kLanes * heads.value_bytes() / depth;  // lines of a block's values to prefetch per entry
    for (int block = 0; block < blocks; ++block, keys += 2 * size) {
        Floats low[Q], high[Q];
        for (int q = 0; q < Q; ++q) low[q] = high[q] = Floats::all(0.0f);
        for (int first = 0; first < depth; first += K::kRun) {
            const auto low_scales = K::scales(keys, depth, first), high_scales = K::scales(keys + size, depth, first);
            const int end = first + K::kRun < depth ? first + K::kRun : depth;
            for (int i = first; i < end; ++i, values += share) {
                if (fetches) {
                    for (int half = 2; half < 4; ++half)
                        __builtin_prefetch(keys + half * size + static_cast<int64_t>(i) * size / depth, 0, 2);
                    for (int line = 0; line < share; line += 64) __builtin_prefetch(values + line, 0, 2);
                }
                const Floats k_low = K::key(keys, i, low_scales), k_high = K::key(keys + size, i, high_scales);
                for (int q = 0; q < Q; ++q) {
                    const Floats entry = Floats::all(queries[q].entries[i]);
                    low[q] = fma(entry, k_low, low[q]);
                    high[q] = fma(entry, k_high, high[q]);
                }
            }
        }
        for (int q = 0; q < Q; ++q) {
            low[q].store(queries[q].scores + block * 2 * kLanes);
            high[q].store(queries[q].scores + block * 2 * kLanes + kLanes);
        }
    }
}

/// Adds V vectors of values that one query sees, for the positions from `begin` to `end`.
template <class K, int V>
inline void add_values(const uint8_t* values, const Heads& heads, int first, const Query& query, int begin, int end,
                       Floats (&total)[V]) {
    for (int place = begin; place < end; ++place) {
        const uint8_t* slot = values + query.visible.slot(place) * static_cast<int64_t>(heads.value_bytes());
        const Floats weight = Floats::all(query.scores[place]);
        for (int v = 0; v < V; ++v)
            total[v] = fma(weight, K::value(slot, heads.width(), first + v * kLanes), total[v]);
    }
}

/// Computes V vectors of the results of Q queries, starting with entry `first`.
template <class K, int Q, int V>
inline void mix_values(const uint8_t* values, const Heads& heads, int first, const Common& common, const Query* queries,
                       float* out) {
    const int width = heads.width();
    const int64_t size = heads.value_bytes();
    Floats total[Q][V];
    const float* weights[Q];
    for (int q = 0; q < Q; ++q) {
        for (int v = 0; v < V; ++v) total[q][v] = Floats::all(0.0f);
        weights[q] = queries[q].scores + queries[q].before;
        add_values<K, V>(values, heads, first, queries[q], 0, queries[q].before, total[q]);
    }
    for (int slot = common.begin; slot < common.end; ++slot) {
        Floats value[V];
        for (int v = 0; v < V; ++v) value[v] = K::value(values + slot * size, width, first + v * kLanes);
        for (int q = 0; q < Q; ++q) {
            const Floats weight = Floats::all(weights[q][slot - common.begin]);
            for (int v = 0; v < V; ++v) total[q][v] = fma(weight, value[v], total[q][v]);
        }
    }
    for (int q = 0; q < Q; ++q) {
        const Query& query = queries[q];
        add_values<K, V>(values, heads, first, query, query.after, query.visible.count(), total[q]);
        for (int v = 0; v < V; ++v)
            (total[q][v] * Floats::all(query.inverse)).store(out + q * kDepthMax + first + v * kLanes);
    }
}

template <class K, int Q>
void attend_queries(const Heads& heads, const uint8_t* keys, const uint8_t* values, bool fetches, Query* queries,
                    float* out) {
    constexpr int kBlockSlots = 2 * kLanes;
    const VisibleSlots& first_query = queries[0].visible;
    int last = 0;
    Common common = {first_query.first, first_query.first + first_query.run, first_query.slot(0)};
    for (int q = 0; q < Q; ++q) {
        const VisibleSlots& visible = queries[q].visible;
        if (visible.last_slot() > last) last = visible.last_slot();
        if (visible.first > common.begin) common.begin = visible.first;
        if (visible.first + visible.run < common.end) common.end = visible.first + visible.run;
        if (visible.slot(0) < common.base) common.base = visible.slot(0);
    }
    if (common.end < common.begin) common.end = common.begin;
    const int first_block = common.base / kBlockSlots;
    common.base = first_block * kBlockSlots;
    score_keys<K, Q>(keys + static_cast<int64_t>(common.base) * heads.key_bytes(),
                     values + static_cast<int64_t>(common.base) * heads.value_bytes(), heads,
                     last / kBlockSlots + 1 - first_block, fetches, queries);
    for (int q = 0; q < Q; ++q) {
        Query& query = queries[q];
        const VisibleSlots& visible = query.visible;
        const bool is_common = common.begin < common.end;
        query.before = is_common ? common.begin - visible.first : 0;
        query.after = is_common ? common.end - visible.first : 0;
        // slots are ascending, so no score is overwritten before it is read
        const int skipped = visible.first - common.base;
        for (int i = 0; skipped > 0 && i < visible.run; ++i) query.scores[i] = query.scores[skipped + i];
        for (int i = 0; i < visible.num_more; ++i)
            query.scores[visible.run + i] = query.scores[visible.more[i] - common.base];
        if (heads.cap > 0.0f) cap_all(query.scores, visible.count(), heads.cap);
        query.inverse = exponentials(query.scores, visible.count(), query.sink);
    }
    constexpr int kVectors = Q * kMixVectors > 16 ? kMixVectors / 2 : kMixVectors;  // sums stay in registers
    int first = 0;
    for (; first + kVectors * kLanes <= heads.width(); first += kVectors * kLanes)
        mix_values<K, Q, kVectors>(values, heads, first, common, queries, out);
    for (; first < heads.width(); first += kLanes)
        mix_values<K, Q, 1>(values, heads, first, common, queries, out);
}

/// Does the same as attend_queries for `count` queries, Q at most at a time.
template <class K, int Q>
void attend_some(int count, const Heads& heads, const uint8_t* keys, const uint8_t* values, bool fetches,
                 Query* queries, float* out) {
    if constexpr (Q > 1)
        if (count < Q) return attend_some<K, Q - 1>(count, heads, keys, values, fetches, queries, out);
    attend_queries<K, Q>(heads, keys, values, fetches, queries, out);
}

/// Multiplies a head's result by the sigmoid of its gates.
inline void gate_head(const float* gates, int depth, float* out) {
    for (int first = 0; first < depth; first += kLanes) {
        alignas(64) float entries[kLanes] = {};
        for (int i = 0; i < kLanes && first + i < depth; ++i) entries[i] = gates[first + i];
        (Floats::load(out + first) * sigmoid(Floats::load(entries))).store(out + first);
    }
}

template <class K>
void attend_tile(const Attend& task, const QueryTile& tile, float* scores) {
    const Heads& heads = task.heads;
    const KeyValues& store = task.spans[tile.span];
    const int64_t first_slot = static_cast<int64_t>(tile.key_head) * store.slots;
    const uint8_t* keys = store.keys + first_slot * heads.key_bytes();
    const uint8_t* values = store.values + first_slot * heads.value_bytes();
    Query queries[kQueries];
    for (int q = 0; q < tile.count; ++q) {
        const int row = (tile.first + q) / heads.group();
        const int head = tile.key_head * heads.group() + (tile.first + q) % heads.group();
        const float* mixed = task.mixed + static_cast<int64_t>(row) * heads.outputs();
        for (int i = 0; i < heads.head_groups(); ++i)
            task.out.from(row, head * heads.head_groups() + i).prefetch_for_write();
        queries[q] = {mixed + head * heads.depth, task.visible_slots[row].within(task.window, task.is_causal),
                      scores + static_cast<int64_t>(q) * store.slots, 0, task.sinks ? task.sinks + head : nullptr, 0, 0};
    }
    alignas(64) float out[kQueries * kDepthMax];
    for (int q = 0; q < tile.count; ++q)
        for (int i = heads.width(); i < heads.head_groups() * kGroup; ++i) out[q * kDepthMax + i] = 0.0f;
    attend_some<K, kQueries>(tile.count, heads, keys, values, tile.fetches, queries, out);
    for (int q = 0; q < tile.count; ++q) {
        const int row = (tile.first + q) / heads.group();
        const int head = tile.key_head * heads.group() + (tile.first + q) % heads.group();
        if (heads.is_gated)
            gate_head(task.mixed + static_cast<int64_t>(row) * heads.outputs() + heads.gates_at() + head * heads.depth,
                      heads.depth, out + q * kDepthMax);
        for (int i = 0; i < heads.head_groups(); ++i) {
            const int group = head * heads.head_groups() + i;
            quantize_group(out + q * kDepthMax + i * kGroup, task.out, row, group);
        }
    }
}

void attend(const Attend& task, int tile, float* scores) {
    switch (task.heads.kv_format) {
        case KvFormat::float32: return attend_tile<KvFloats<float>>(task, task.tiles[tile], scores);
        case KvFormat::float16: return attend_tile<KvFloats<Half>>(task, task.tiles[tile], scores);
        case KvFormat::int8: return attend_tile<KvInt8>(task, task.tiles[tile], scores);
    }
}

}  // namespace
}  // namespace outpace

// Units of work of a forward, and the table of functions that each instruction set provides for them.
#pragma once

#include <string>
#include <vector>

#include "layout.h"
#include "recurrence.h"
#include "router.h"

namespace outpace {

constexpr int kRotateRows = 16;  // rows per unit of Rotate

/// Converts x (rows of `stride` floats, zero after `size`) to x / rms(x) * weight in int8, or x itself without a weight.
/// One unit: one row.
struct Normalize {
    const float* x;
    const float* weight;  // [stride], zero after `size`; may be null
    int size;
    int stride;
    float epsilon;
    const int* rows;  // indices of rows of x, or null for all in order
    Activations out;
    float* normed = nullptr;  // [rows, stride]: the result in float32 too, if not null; needs a weight
};

/// x[row] = (x[row] + branch[row] / rms(branch[row]) * weight) * scale. One unit: one row. The padding of a row of `branch` may hold
/// anything.
struct AddNormed {
    float* x;
    float* branch;
    const float* weight;  // [stride], zero after `size`
    int size;
    int stride;
    float epsilon;
    float scale = 1.0f;
};

/// Changes rows of x to x / rms(x) * weight, in float32. One unit: one row.
struct NormRows {
    float* x;
    int64_t stride;
    const float* weight;  // [size]
    int size;  // a multiple of kLanes
    float epsilon;
};

/// What products prefetch, by the processor's maker. AMD's processors take down to 0.75 of the time if one and two rows
/// prefetch, and down to half with near prefetches.
struct PrefetchPolicy {
    bool few_prefetch;  // one or two rows prefetch; otherwise this is measured (fetch_trial.h)
    bool is_near;  // rows also prefetch a few kilobytes ahead into the first cache
};
PrefetchPolicy prefetch_policy();

/// What a thread prefetches while it computes a unit of a product: `next` during the last unit before `end`, otherwise
/// the next unit.
struct Prefetch {
    int end;
    const uint8_t* next;
    bool is_on;  // whether to prefetch `next`, and the weights of the next unit

    /// Returns the distance from the weights of `unit`, at `place`, to what is needed after it. `bytes`: a unit's size.
    int64_t ahead(int unit, const uint8_t* place, int64_t bytes) const {
        return unit + 1 == end ? reinterpret_cast<intptr_t>(next) - reinterpret_cast<intptr_t>(place) : bytes;
    }
};

/// out[row] = W x + bias, or out[row] += W x + bias. One unit: one panel, for all rows.
struct Product {
    Panels weights;
    Prefetch prefetch;
    Activations in;
    int rows;
    float* out;  // [rows, stride]
    int64_t stride;
    bool add;
};

/// How an MLP gates: silu(gate) * up, gelu(gate) * up (by tanh), or gpt-oss's (up + 1) * gate * sigmoid(1.702 gate) with
/// gate at most `limit` and up within it on both sides.
enum class Gating { silu, gelu, clamped };

/// The gate of an MLP times its other half in int8; panels hold 16 gates and 16 ups each. One unit: one group of outputs, for all rows.
struct GatedProduct {
    Panels weights;
    Prefetch prefetch;
    Activations in;
    int rows;
    Activations out;
    const float* const* mlp_bias;  // biases of each row, or null; this layer's start at `mlp_bias_first`
    int64_t mlp_bias_first;
    Gating gating;
    float limit;
};

/// The keys and values of one session in one layer.
/// keys [kv_heads, slots / 16, depth, 16], values [kv_heads, slots, width], width = depth rounded up to 16; formats and
/// scales: kv_formats.h.
struct KeyValues {
    uint8_t* keys;
    uint8_t* values;
    int slots;  // a multiple of 32
};

/// Slots that a row sees, in position order: first .. first + run - 1, then the slots `more`, ascending.
struct VisibleSlots {
    int first;
    int run;
    int num_more;
    const int* more;
    int num_own;  // number of these slots up to the row's own, which is the last unless the row sees later rows

    int count() const { return run + num_more; }
    int slot(int place) const { return place < run ? first + place : more[place - run]; }
    int last_slot() const { return slot(count() - 1); }

    /// Drops all but the last `window` slots up to the row's own (0: none), and if `is_causal`, the later ones.
    VisibleSlots within(int window, bool is_causal) const {
        const int drop = window && num_own > window ? num_own - window : 0, end = is_causal ? num_own : count();
        const int of_run = drop < run ? drop : run, of_more = drop - of_run, last = end < run ? end : run;
        return {first + of_run, last - of_run, end - last - of_more, more + of_more, num_own - drop};
    }
};

/// Sizes of attention.
struct Heads {
    int queries;  // number of query heads
    int keys;  // number of heads of keys and values
    int depth;  // entries of a head
    KvFormat kv_format;  // format of keys and values
    float scale;  // factor of attention scores
    float epsilon;  // epsilon of the norms of queries and keys
    bool is_gated = false;  // results are multiplied by the sigmoid of a gate of their own
    float cap = 0.0f;  // scores become cap tanh(score / cap); 0: they stay
    int projected = 2;  // what is projected besides queries: keys and values, 1: keys, which are the values, or 0: neither
    bool norms_values = false;  // values are divided by their rms

    int group() const { return queries / keys; }
    int width() const { return round_up(depth, kLanes); }
    int gates_at() const { return (queries + projected * keys) * depth; }  // among the outputs
    int outputs() const { return gates_at() + (is_gated ? queries * depth : 0); }
    int head_groups() const { return round_up(depth, kGroup) / kGroup; }

    /// Bytes of one slot's key, or value.
    int key_bytes() const { return entries_bytes(depth); }
    int value_bytes() const { return entries_bytes(width()); }

    /// Whether slots of both have the same layout.
    bool has_slots_of(const Heads& other) const {
        return keys == other.keys && depth == other.depth && kv_format == other.kv_format;
    }

  private:
    int entries_bytes(int count) const {
        if (kv_format == KvFormat::int8) return count + round_up(count, kScaled) / kScaled * 2;
        return count * (kv_format == KvFormat::float16 ? 2 : 4);
    }
};

/// Normalizes (if there are norms), rotates and scales queries; normalizes, rotates and stores keys; stores values, which
/// may be what the keys were. One unit: a head in up to kRotateRows rows, so that a thread finds most of its input where it wrote it.
struct Rotate {
    Heads heads;
    int rows;
    float* mixed;  // [rows, queries then keys then values, then gates], what is projected; changed in place
    const float* rope_rows;  // [rows, depth / 2, 2]: cosine and sine; null for layers without positions
    int rope_stride;  // floats from one row to the next
    const float* query_norm;  // [depth] or null
    const float* key_norm;
    const int* slots;  // slot of each row in its session
    const int* row_spans;  // index of each row's session
    const KeyValues* spans;

    int units_a_block() const { return heads.queries + (heads.projected ? heads.keys : 0); }
    int units() const { return units_a_block() * ((rows + kRotateRows - 1) / kRotateRows); }
};

/// Queries that share their keys: numbers first .. first + count - 1 in the order (row, head of the group). The first
/// tile of keys prefetches them from memory; later ones find them in the cache.
struct QueryTile {
    int span;
    int key_head;
    int first;
    int count;
    bool fetches;
};

/// softmax(queries keys) values, in int8. One unit: one tile.
struct Attend {
    Heads heads;
    const float* mixed;  // [rows, outputs], as Rotate leaves it
    const VisibleSlots* visible_slots;
    const KeyValues* spans;
    const QueryTile* tiles;
    Activations out;  // every head padded to whole groups
    int window;  // number of tokens that a row sees, itself included; 0: all
    bool is_causal;  // a row sees no later rows
    const float* sinks;  // [queries]: scores without a value, or null
};

/// Scores of experts in float32: a chain of fused multiply-adds over the inputs, plus the bias. One unit: 16 experts, for
/// all rows.
struct ScoreExperts {
    const Router& router;
    const float* x;  // [rows, stride]
    int64_t stride;
    int rows;
    float* scores;  // [rows, router.stride()]
};

/// Chooses the experts of a row, of equal scores the first, and weighs them. One unit: one row.
struct ChooseExperts {
    const Router& router;
    float* scores;  // changed in place
    int* chosen;  // [rows, used], rising
    float* weights;  // [rows, shares]
};

/// Joins a row's embeddings for each layer: (x / rms(x) * norm + table * table_scale) * sqrt(1 / 2), where x is multiplied
/// by `scale` first. One unit: one row.
struct JoinEmbeddings {
    float* x;  // [rows, layers, size]; changed in place
    const float* table;  // [rows, layers * size in whole groups]
    int64_t table_stride;
    const float* norm;  // [size]
    int layers, size;
    float epsilon, scale, table_scale;
};

/// gelu(x) * by, or silu, in int8. One unit: one row.
struct GateRow {
    const float* x;  // [rows, size]
    const float* by;  // [rows, stride]
    int64_t stride;
    int size;
    Activations out;
    Gating gating;
};

constexpr int kEmbeddedMax = 1024;  // entries of an embedding for one layer
constexpr int kCapped = 4096;  // columns of a unit of CapLogits

/// Changes logits to cap tanh(x / cap). One unit: kCapped columns of a row.
struct CapLogits {
    float* x;  // [rows, columns]
    int columns;
    float cap;

    int units_a_row() const { return (columns + kCapped - 1) / kCapped; }
};

constexpr int kMixed = 256;  // columns of a unit of MixExperts

/// x[row] = sum of the outputs of its experts, in the order of their numbers, and of the shared expert, each times its
/// weight, by fused multiply-adds; or x[row] += that sum. One unit: kMixed columns of a row.
struct MixExperts {
    int used;
    const float* outputs;  // [pairs, stride]
    const int* pairs;  // [rows, used]
    const float* shared;  // [rows, stride] or null
    const float* weights;  // [rows, used + 1]
    int size;
    int stride;
    float* x;  // [rows, stride]
    bool add;

    int units_a_row() const { return (stride + kMixed - 1) / kMixed; }
};

/// Filters of a row's tokens, as in outpace/core/sampling.py; 0, 1 and 0 keep all.
struct Filters {
    int top_k;
    double top_p, min_p;

    bool are_there() const { return top_k || top_p < 1.0 || min_p > 0.0; }
};

/// A row of logits, ranked by x / temperature plus the noise of `key`.
struct Ranking {
    const float* scores;  // [size]
    const int64_t* tokens;  // [size], or null: 0, 1, ...
    int size;
    double temperature;
    const uint64_t* key;  // key of the noise, or null
    bool whole;  // values minus the logarithm of the sum of e^(x / temperature), as always with filters
    Filters filters = {0, 1.0, 0.0};
};

struct Ranked {
    int64_t token;
    double value;
};

constexpr int kMeasuredSums = 12 * kLanes;  // most of a tile

/// The functions of one instruction set. All sets give the same bits as the portable one.
struct Kernels {
    const char* name;
    int tile_queries;  // preferred number of queries in a tile of Attend
    void (*normalize)(const Normalize&, int row);
    void (*add_normed)(const AddNormed&, int row);
    void (*norm_rows)(const NormRows&, int row);
    void (*product)(const Product&, int panel);
    void (*gated_product)(const GatedProduct&, int group);
    void (*rotate)(const Rotate&, int unit);
    void (*attend)(const Attend&, int tile, float* scores);  // scores: space for tile_queries times slots
    void (*recur)(const Recur&, int unit, float* states);  // states: space for those of kStateVectors columns
    void (*score_experts)(const ScoreExperts&, int vector);
    void (*choose_experts)(const ChooseExperts&, int row);
    void (*mix_experts)(const MixExperts&, int unit);
    void (*cap_logits)(const CapLogits&, int unit);
    void (*join_embeddings)(const JoinEmbeddings&, int row);
    void (*gate_row)(const GateRow&, int row);
    int (*rank)(const Ranking&, int count, Ranked* best);  // returns the number found, 0 for a row without order
    int64_t (*multiply_only)(int rounds, float* out);  // returns the number of products; out [kMeasuredSums]
};

/// Returns the sets that this machine can run, the fastest first; the last is the portable one.
std::vector<const Kernels*> available_kernels();

/// Returns the set with this name, the fastest for an empty name, or null if this machine cannot run it.
const Kernels* find_kernels(const std::string& name);

}  // namespace outpace

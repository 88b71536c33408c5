// The work that a forward is cut into, and the table of functions that one instruction set gives for it.
#pragma once

#include <string>
#include <vector>

#include "layout.h"

namespace outpace {

constexpr int kRotateRows = 16;  // of a unit of Rotate

/// x (rows of `stride` floats, zero beyond `size`) to x / rms(x) * weight in int8. One unit: one row.
struct Normalize {
    const float* x;
    const float* weight;  // [stride], zero beyond `size`
    int size;
    int stride;
    float epsilon;
    const int* rows;  // which rows of x, or null for all in order
    Activations out;
};

/// x[row] += branch[row] / rms(branch[row]) * weight. One unit: one row. What pads a row of `branch` may hold anything.
struct AddNormed {
    float* x;
    float* branch;
    const float* weight;  // [stride], zero beyond `size`
    int size;
    int stride;
    float epsilon;
};

/// Which weights a product asks for before it needs them, as far as the processor's maker tells. AMD's take down to 0.75 of
/// the time where one and two rows ask, and down to half where what is asked for is near.
struct Fetching {
    bool few_ask;  // one or two rows ask for what comes next; where not, it is tried, see fetch_trial.h
    bool is_near;  // rows ask also a few kilobytes ahead, into the first cache
};
Fetching fetching();

/// What a thread reads when it has done its own units of a product: while the one before unit `end` is computed, `next` is
/// fetched from memory; while another is, the one behind it.
struct Following {
    int end;
    const uint8_t* next;
    bool asks;  // for it, and for the weights of the next unit

    /// Bytes from the weights of `unit`, at `place`, to what is needed after it. `bytes`: of a unit.
    int64_t ahead(int unit, const uint8_t* place, int64_t bytes) const {
        return unit + 1 == end ? reinterpret_cast<intptr_t>(next) - reinterpret_cast<intptr_t>(place) : bytes;
    }
};

/// out[row] = W x + bias, or out[row] += W x + bias. One unit: one panel, for all rows.
struct Product {
    Panels weights;
    Following following;
    Activations in;
    int rows;
    float* out;  // [rows, stride]
    int64_t stride;
    bool add;
};

/// f(gate) * up in int8; panels hold 16 gates and 16 ups each. One unit: one group of outputs, for all rows.
struct GatedProduct {
    Panels weights;
    Following following;
    Activations in;
    int rows;
    Activations out;
    const float* const* steer;  // of each row, or null: what is added to its ups begins `steer_first` further on
    int64_t steer_first;
    bool is_gelu;  // f is GELU by tanh, else SiLU
};

/// Where one session's keys and values of one layer lie.
/// keys [kv_heads, slots / 16, depth, 16], values [kv_heads, slots, width], width = depth rounded up to 16; how they
/// are held, and where scales lie: held.h.
struct KeyValues {
    uint8_t* keys;
    uint8_t* values;
    int slots;  // a multiple of 32
};

/// What a row sees, in the order of positions: slots first .. first + run - 1, then the slots `more`, which rise.
struct Reach {
    int first;
    int run;
    int num_more;
    const int* more;

    int count() const { return run + num_more; }
    int slot(int place) const { return place < run ? first + place : more[place - run]; }
    int last_slot() const { return slot(count() - 1); }

    /// The last `window` of it, or all where they are no more; 0: all.
    Reach within(int window) const {
        const int drop = window && count() > window ? count() - window : 0;
        const int of_run = drop < run ? drop : run, of_more = drop - of_run;
        return {first + of_run, run - of_run, num_more - of_more, more + of_more};
    }
};

/// Which sizes the attention of all layers has.
struct Heads {
    int queries;    // heads
    int keys;       // heads of keys and values
    int depth;      // of a head
    KvFormat held;  // keys and values
    float scale;    // of scores
    float epsilon;  // of the norms of queries and keys

    int group() const { return queries / keys; }
    int width() const { return round_up(depth, kLanes); }
    int outputs() const { return (queries + 2 * keys) * depth; }
    int head_groups() const { return round_up(depth, kGroup) / kGroup; }

    /// Bytes of one slot's key, or value.
    int key_bytes() const { return entries_bytes(depth); }
    int value_bytes() const { return entries_bytes(width()); }

  private:
    int entries_bytes(int count) const {
        if (held == KvFormat::int8) return count + round_up(count, kScaled) / kScaled * 2;
        return count * (held == KvFormat::float16 ? 2 : 4);
    }
};

/// Norms (where there are any), turns and scales queries; norms, turns and stores keys; stores values. One unit: a head
/// of queries, or of keys and values, in so many rows. So a thread finds most of what it works on where it wrote it.
struct Rotate {
    Heads heads;
    int rows;
    float* mixed;             // [rows, queries then keys then values]; the queries are worked on in place
    const float* turns;       // [rows, depth / 2, 2]: cosine and sine; null where the layer knows no positions
    int turns_stride;         // floats from one row's to the next one's
    const float* query_norm;  // [depth] or null
    const float* key_norm;
    const int* slots;      // of each row, in its session
    const int* row_spans;  // of each row, its session's number
    const KeyValues* spans;

    int units_a_block() const { return heads.queries + heads.keys; }
    int units() const { return units_a_block() * ((rows + kRotateRows - 1) / kRotateRows); }
};

/// Some queries that share their keys: numbers first .. first + count - 1 in the order (row, head of the group). The
/// first tile of keys fetches them from memory; those that follow find them in the cache.
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
    const Reach* reaches;
    const KeyValues* spans;
    const QueryTile* tiles;
    Activations out;  // every head padded to whole groups
    int window;       // tokens that a row sees, itself included; 0: all
};

/// Which tokens of a row are left, as outpace/core/sampling.py says; 0, 1 and 0 leave all.
struct Filters {
    int top_k;
    double top_p, min_p;

    bool are_there() const { return top_k || top_p < 1.0 || min_p > 0.0; }
};

/// A row of scores, and what its tokens are ranked by: x / temperature, and the noise that `key` gives a token.
struct Ranking {
    const float* scores;    // [held]
    const int64_t* tokens;  // [held], or null: 0, 1, ...
    int held;
    double temperature;
    const uint64_t* key;  // or null: no noise
    bool whole;           // values less the logarithm of the sum of e^(x / temperature)
    Filters filters = {0, 1.0, 0.0};
};

struct Ranked {
    int64_t token;
    double value;
};

/// One instruction set. Every table gives the same bits as the portable one.
struct Kernels {
    const char* name;
    int tile_queries;  // most queries that Attend likes in a tile
    void (*normalize)(const Normalize&, int row);
    void (*add_normed)(const AddNormed&, int row);
    void (*product)(const Product&, int panel);
    void (*gated_product)(const GatedProduct&, int group);
    void (*rotate)(const Rotate&, int unit);
    void (*attend)(const Attend&, int tile, float* scores);  // scores: room for tile_queries times slots
    int (*rank)(const Ranking&, int count, Ranked* best);  // how many were found; 0 for a row that has no order
};

/// The tables that this machine can run, the fastest first; the last is the portable one.
std::vector<const Kernels*> available_kernels();

/// The table of that name; the fastest where the name is empty; null where this machine has none of that name.
const Kernels* find_kernels(const std::string& name);

}  // namespace outpace

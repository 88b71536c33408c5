// Sizes of recurrent layers, what a session keeps for them, and their unit of work.
//
// A session has one state for each recurrent layer, after its committed tokens. A pass stashes for each node what the
// state needs to take the node in: its row before the filter and, for a delta net, decays, keys and deltas. The next
// pass folds the accepted nodes into the state, in their order and by the operations that their verification used, so
// the state has the bits that one-by-one decoding gives.
#pragma once

#include <cstddef>
#include <vector>

#include "layout.h"

namespace outpace {

/// Sizes of a model's recurrent layers, all of one kind: gated delta nets (with value heads) or short convolutions. The
/// channels, and the depths of heads, are multiples of kLanes.
struct Recurrence {
    int layers = 0;         // number of recurrent layers of the model
    int filter_length = 0;  // tokens that a filter reads, the row's own included
    int channels = 0;       // filtered entries of a row; of a delta net queries and keys, then values
    int key_heads = 0;      // the following are of delta nets only
    int value_heads = 0;
    int key_depth = 0;
    int value_depth = 0;
    bool is_tiled = false;  // value head j has key head j mod key_heads, else j div (value_heads / key_heads)

    bool is_delta_net() const { return value_heads > 0; }
    int shared() const { return value_heads / key_heads; }  // value heads of a key head
    int value_head(int key_head, int number) const {
        return is_tiled ? number * key_heads + key_head : key_head * shared() + number;
    }
    int key_width() const { return key_heads * key_depth; }
    int value_width() const { return value_heads * value_depth; }
    int head_size() const { return key_depth * value_depth; }
    int history() const { return (filter_length - 1) * channels; }

    /// Floats of a layer's state: the value heads' matrices [value_depth / 16, key_depth, 16], then the last committed
    /// rows before the filter, the latest last.
    std::size_t state_size() const {
        return static_cast<std::size_t>(value_heads) * head_size() + history();
    }

    /// Floats that a node stashes in a layer: its row before the filter, the heads' decays, keys and deltas.
    int decays_at() const { return channels; }
    int keys_at() const { return decays_at() + round_up(value_heads, kLanes); }
    int deltas_at() const { return keys_at() + key_width(); }
    std::size_t stash_size() const { return static_cast<std::size_t>(deltas_at()) + value_width(); }

    /// Outputs of a layer's input matrix: the channels and the gates of the outputs, or for a short convolution the
    /// gates of inputs and outputs, then the inputs.
    int inputs_end() const { return is_delta_net() ? channels + value_width() : 3 * channels; }
    /// Outputs of both its input matrices: strengths and steps of the value heads follow.
    int outputs() const { return inputs_end() + 2 * value_heads; }

    /// Groups of the output matrix's inputs; those of a delta net are padded head by head.
    int head_groups() const { return round_up(value_depth, kGroup) / kGroup; }
    int output_groups() const {
        return is_delta_net() ? value_heads * head_groups() : round_up(channels, kGroup) / kGroup;
    }

    /// Units of work for one session's rows.
    int units() const { return is_delta_net() ? key_heads : output_groups(); }

    bool operator==(const Recurrence&) const = default;
};

/// The weights of a recurrent layer besides its matrices.
struct RecurrentWeights {
    std::vector<float> filters;    // [filter_length, channels], the earliest token's first
    std::vector<float> rates;      // [value_heads]: -e^A_log
    std::vector<float> time_bias;  // [value_heads]
    std::vector<float> norm;       // [value_depth]
};

/// A step through the states of a session's tree. The state `to` becomes the state `from` with the node `place`; then
/// `row`, a child of that node, is computed. -1 as `place`: `from` stays as it is; as `row`: none; as a state: the
/// committed one.
struct WalkStep {
    int from, place, to, row;

    /// Whether this step only takes a further node into the state that `other` makes.
    bool continues(const WalkStep& other) const { return place >= 0 && from == other.to && to == other.to; }
};

/// The rows of a session in a pass, and the walk through its tree: first the accepted nodes, then depth first.
struct Sequence {
    float* state;          // [layers, state_size()]
    float* const* stash;   // [places]: [layers, stash_size()] each
    int first_row, rows;
    int first_step, steps;
    int first_fold, folds;  // the accepted nodes
};

/// A recurrent layer between its two products. One unit: a key head with its value heads, or a group of channels, in
/// all rows of a sequence.
struct Recur {
    const Recurrence& sizes;
    const RecurrentWeights& weights;
    int layer;  // among the recurrent ones
    float epsilon;
    float* mixed;  // [rows, stride]: results of the input products
    int64_t stride;
    const Sequence* sequences;
    const int* places;  // [rows]: where a row is stashed
    const int* earlier;  // [rows, filter_length - 1]: the place of a row's n-th ancestor; -n: the n-th last committed row
    const WalkStep* steps;
    const int* folds;  // places
    bool folds_only;
    Activations out;

    float* stash(const Sequence& sequence, int place) const {
        return sequence.stash[place] + sizes.stash_size() * layer;
    }
    float* state(const Sequence& sequence) const { return sequence.state + sizes.state_size() * layer; }
};

constexpr int kStateVectors = 2;  // columns of a state, times 16, that are walked together: they stay in the first cache

}  // namespace outpace

// A target and a draft model on this machine: whole rounds of drafting and verifying in one call.
#pragma once

#include <mutex>
#include <vector>

#include "adjusting.h"
#include "copies.h"
#include "memory.h"
#include "model.h"
#include "noise.h"
#include "planned_tree.h"

namespace outpace {

/// A model, the tokens of its logits, and its rotations.
struct Side {
    Model* model;
    const int64_t* names;  // the tokens of the first `held` logits of a row, or null: 0, 1, ...
    int held;
    const float* turns;  // [positions, rotations * depth / 2, 2]
    int positions;  // of the table
    int last_position;  // the last of the model's context; a tree may reach past it, committed tokens never do
    int last_token;  // larger ones, from padded vocabularies, are read as this one
};

/// A session of one of the models.
struct Place {
    Store* store;
    int length;  // committed slots
};

/// One request: its sessions, and the tree at the start of its first round.
struct Drafted {
    Place target, draft;
    std::vector<int> missing;  // committed tokens before the root that the draft model has not read
    std::vector<int> tokens, parents;
    std::vector<double> scores, chances;
    Plan plan;
    int rows;  // rows of its last pass
    bool follows;  // the draft model has read all but the last round's tokens
    int most_depth;  // of nodes that may be expanded
    int left;  // tokens that may still be written
    std::vector<int> stops;
    Copies* copies;  // of its text, or null: nothing is copied
    std::vector<double> log_rates;
    Noise noise;  // ranks its rows and those of the draft model
    Adjusting* adjusting;  // applied to the logits of both models first, or null
};

/// Proposals below a node on the accepted path, and which of them the target wrote.
struct Picked {
    std::vector<double> values;
    int number;  // negative: none of them
};

/// One request's round. Nodes are numbered in the order of verification, the root first.
struct Outcome {
    std::vector<int> known;  // nodes that existed before, with their old numbers
    std::vector<int> tokens, parents;  // the others
    std::vector<double> scores;
    std::vector<bool> copied;  // whether each of the others was copied
    std::vector<Planted> planted;  // copies below each node on the path
    std::vector<int> picks, path;
    std::vector<Grown> layers;
    bool is_trial;
    bool is_fewer;  // fewer were verified than pay
    std::vector<Picked> picked;
};

/// A draft forward, shared by several requests.
struct Forward {
    double seconds;
    int requests;
    bool is_step;  // it read only proposed tokens
};

struct Round {
    std::vector<Outcome> outcomes;  // by request
    std::vector<Forward> forwards;
    double copy_seconds, target_seconds, seconds;
};

/// Buffers that outlive a call, so that it need not allocate once they are large enough.
class Pair {
  public:
    /// Runs up to `most` rounds of all requests within `seconds`. A round does not start after the end of a request, or
    /// if a session lacks slots; it is not reported if a row of logits has no order or is too close to call.
    /// The lengths of the places show what is committed afterwards. One call at a time runs.
    std::vector<Round> carry_out(const Side& target, const Side& draft, const Growing& growing, int proposed,
                                 const PassTimes& times, const std::vector<Drafted*>& requests, int most,
                                 double seconds);

  private:
    Block<float> scores_;
    std::mutex running_;
};

}  // namespace outpace

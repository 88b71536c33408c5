// A target and its draft, both on this machine: whole rounds of drafting and verifying in one call.
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

/// A model, what its output layer's scores stand for, and what rows turn by.
struct Side {
    Model* model;
    const int64_t* names;  // the tokens of the first `held` scores of a row, or null: 0, 1, ...
    int held;
    const float* turns;  // [positions, rotations * depth / 2, 2]
    int positions;       // of the table
    int last_position;   // the last of the model's context: a tree may reach past it, what is committed never does
    int last_token;      // larger ones, which padded vocabularies have, are read as this one
};

/// A session of one of the models.
struct Place {
    Store* store;
    int length;  // committed slots
};

/// One request: its sessions, and the tree with which its first round begins.
struct Drafted {
    Place target, draft;
    std::vector<int> missing;  // committed tokens before the root that the draft has not read
    std::vector<int> tokens, parents;
    std::vector<double> scores, chances;
    Plan plan;
    int rows;        // that its last pass had
    bool follows;    // the draft has read all but what the last round wrote
    int most_depth;  // of nodes that the draft may expand
    int left;        // tokens that may still be written
    std::vector<int> stops;
    Copies* copies;  // of its text, or null: nothing is copied
    std::vector<double> log_rates;
    Noise noise;  // that its rows and the draft's are ranked with
    Adjusting* adjusting;  // both models' scores before that, or null
};

/// What the draft proposed below a walked node, and which of it the target wrote.
struct Picked {
    std::vector<double> values;
    int number;  // below 0: none of it
};

/// One request's round. Nodes are numbered as they were verified, the root first.
struct Outcome {
    std::vector<int> known;  // those that stood there before, as they were numbered then
    std::vector<int> tokens, parents;  // the others
    std::vector<double> scores;
    std::vector<bool> copied;  // of the others: whether they were copied
    std::vector<Planted> planted;  // below each walked node, where something was copied
    std::vector<int> picks, path;
    std::vector<Grown> layers;
    bool is_trial;
    bool is_fewer;  // fewer were verified than pay
    std::vector<Picked> picked;
};

/// A forward of the draft, of which several requests have a share.
struct Forward {
    double seconds;
    int requests;
    bool is_step;  // it read nothing, for any of them, but what it had proposed
};

struct Round {
    std::vector<Outcome> outcomes;  // by request
    std::vector<Forward> forwards;
    double copy_seconds, target_seconds, seconds;
};

/// Room that outlives a call, so that none is made in it once it is large enough.
class Pair {
  public:
    /// Up to `most` rounds of all requests together, while they take no more than `seconds`: none begins behind the end
    /// of a request, and none for which a session has no slots. None is told of where a row of scores has no order, or
    /// its winner is too close to call.
    /// What is committed afterwards is told by the places' lengths. One call at a time runs.
    std::vector<Round> carry_out(const Side& target, const Side& draft, const Growing& growing, int proposed,
                                 const PassTimes& times, const std::vector<Drafted*>& requests, int most,
                                 double seconds);

  private:
    Block<float> scores_;
    std::mutex running_;
};

}  // namespace outpace

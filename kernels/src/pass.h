// One forward: its buffers, and the phases that the team's members go through together.
#pragma once

#include "model.h"

namespace outpace {

/// Memory for activations of up to a given number of rows.
struct ActivationBuffer {
    Block<int8_t> values;
    Block<GroupFacts> facts;

    Activations view(int rows, int groups);
};

/// Buffers that outlive a pass, so that it need not allocate once they are large enough.
struct Model::Scratch {
    Block<float> x, tokens, mixed, branch, scores;  // tokens: embeddings, if the first layer takes them and x
    ActivationBuffer normed, attended, gated;
    std::vector<int> slots, row_spans, more;
    std::vector<Reach> reaches;
    std::vector<QueryTile> tiles, last_tiles;  // for the last layer, if it has fewer rows
    std::vector<KeyValues> stores;  // layer by layer, in each one per span
    std::vector<const float*> steers;  // of each row, or null; empty if no row is steered
};

class Model::Pass {
  public:
    Pass(Model& model, const Forest& forest, float* scores);

    /// The largest number of phases of `run`.
    int phases() const { return 10 * model_.num_layers() + 5 + forest_.taps.num_layers; }

    /// Runs on every member of the team.
    void run(Team::Member& member);

    /// Does the same for logits of given hidden states only.
    void project(const float* hidden, Team::Member& member);

  private:
    void find_reaches();
    void find_steers();
    void cut_tiles(int rows, std::vector<QueryTile>& tiles);
    bool narrows() const;
    void narrow();
    void embed(int row);
    void take(const float* hidden, int row);
    void show(int number, Team::Member& member);
    /// Rows after a layer's keys and values. A late member recomputes it, so it must not change.
    int rows_behind(int number) const { return is_narrow(number) ? forest_.num_wanted : forest_.rows; }
    bool is_narrow(int number) const { return narrows_ && number == model_.num_layers() - 1; }
    bool skips(int number, int sublayer) const { return forest_.skipped && forest_.skipped[2 * number + sublayer]; }
    void mix(int number, Team::Member& member);
    void feed(int number, Team::Member& member);
    void score(const int* rows, int count, Team::Member& member);
    void rotate(const Layer& layer, const KeyValues* spans, Team::Member& member);
    void attend(const Layer& layer, const std::vector<QueryTile>& tiles, const KeyValues* spans, Team::Member& member);
    void normalize(const std::vector<float>& norm, const Matrix& weights, const int* rows, int count,
                   Team::Member& member);
    void normalize_both(const Layer& layer, Team::Member& member);
    Following following(int number, int units, const Matrix& next, const Team::Member& member) const;
    void add(int number, const Matrix& weights, const Matrix& next, const Activations& in,
             const std::vector<float>& norm, Team::Member& member);
    void multiply(int number, const Matrix& weights, const Matrix& next, const Activations& in, int rows, float* out,
                  int64_t stride, bool add, Team::Member& member);

    Model& model_;
    const Forest& forest_;
    Scratch& scratch_;
    const Kernels& kernels_;
    Team& team_;
    float* scores_;
    int stride_;  // of x
    int most_slots_;  // of any session's store
    bool narrows_;  // the last layer's attention, and what follows, runs for wanted rows only
    Activations normed_, both_, attended_, gated_;  // both_: of tokens, then of x
};

}  // namespace outpace

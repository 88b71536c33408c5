// One forward: its buffers, and the phases that the team's members go through together.
#pragma once

#include <mutex>
#include <string>

#include "model.h"

namespace outpace {

/// Returns the activations in the form that the product with `weights` takes.
inline Activations in_form_for(const Matrix& weights, Activations activations) {
    activations.by_quarters = weights.takes_quarters();
    return activations;
}

/// Memory for activations of up to a given number of rows.
struct ActivationBuffer {
    Block<int8_t> values;
    Block<GroupFacts> facts;

    Activations view(int rows, int groups);
};

/// Buffers that outlive a pass, so that it need not allocate once they are large enough.
struct Model::Scratch {
    Block<float> x, tokens, mixed, branch, scores;  // tokens: embeddings, if the first layer takes both them and x
    Block<float> embeddings, table;  // of every layer: joined, and as the table has them
    ActivationBuffer normalized, attended, gated;
    std::vector<int> slots, row_spans, more;
    std::vector<VisibleSlots> visible_slots;
    std::vector<std::vector<QueryTile>> tiles;  // by number of heads with keys
    std::vector<QueryTile> last_tiles;  // for the last layer, if it has fewer rows
    std::vector<KeyValues> stores;  // [layers, spans]
    std::vector<Sequence> sequences;  // the rows of each session; of models with recurrent layers only, as the following
    std::vector<int> places, earlier, folds;
    std::vector<WalkStep> steps;
    Block<float> states;
    std::vector<ExpertPlan> plans;  // of each layer with experts
    Block<float> normed, expert_scores, expert_outputs, shared_outputs;
    ActivationBuffer expert_inputs, expert_gated, shared_gated;
    std::mutex finding;
    std::string damage;  // what was found first to be wrong with an expert's numbers in the file
    std::vector<const float*> mlp_biases;  // the MLP biases of each row, or null; empty if no row has one
};

class Model::Pass {
  public:
    Pass(Model& model, const Forest& forest, float* scores);

    /// The largest number of phases of `run`.
    int phases() const { return 20 * model_.num_layers() + 10 + forest_.hidden_request.num_layers + num_waves_; }

    /// Runs on every member of the team.
    void run(Team::Member& member);

    /// Takes accepted nodes into the recurrent states only.
    void fold(Team::Member& member);

    /// Runs the final norm and the output layer only, for given hidden states.
    void project(const float* hidden, Team::Member& member);

    /// Reports the experts of the pass. Throws std::domain_error if the numbers of one are not finite, std::bad_alloc.
    void end_experts();

  private:
    void plan_experts();
    void run_experts(int number, Team::Member& member);
    void run_wave(int number, const ExpertWave& wave, bool is_first, Team::Member& member);
    void find_visible_slots();
    void find_mlp_biases();
    void plan_walks();
    void plan_walk(std::size_t first_span, std::size_t end_span);
    void run_recurrent(int number, bool folds_only, Team::Member& member);
    const Recurrence& recurrence() const { return model_.shape_.recurrence; }
    void make_tiles(const Heads& heads, int rows, std::vector<QueryTile>& tiles);
    bool can_drop_rows() const;
    void drop_rows();
    void embed(int row);
    void copy_input(const float* hidden, int row);
    void copy_hidden(int number, Team::Member& member);
    /// Number of rows once a layer's keys and values are stored. A late member recomputes it, so it must not change.
    int num_rows_after(int number) const { return drops_rows(number) ? forest_.num_wanted : forest_.rows; }
    bool drops_rows(int number) const { return drops_rows_ && number == model_.num_layers() - 1; }
    bool skips(int number, int sublayer) const { return forest_.skipped && forest_.skipped[2 * number + sublayer]; }
    void run_attention(int number, Team::Member& member);
    void run_mlp(int number, Team::Member& member);
    void score(const int* rows, int count, Team::Member& member);
    void cap_logits(int rows, Team::Member& member);
    void rotate(int number, const KeyValues* spans, Team::Member& member);
    void attend(int number, const Activations& out, const KeyValues* spans, Team::Member& member);
    void join_embeddings(Team::Member& member);
    void add_embedding(int number, Team::Member& member);
    void gate(const Layer& layer, int number, int rows, const Activations& out, Team::Member& member);
    void normalize(const std::vector<float>& norm, const Activations& out, const int* rows, int count,
                   Team::Member& member, float* normed = nullptr);
    void normalize_tokens_and_states(const Layer& layer, Team::Member& member);
    const uint8_t* start_of(const Matrix& weights, const Team::Member& member) const;
    const uint8_t* start_of_mlp(const Layer& layer, const Team::Member& member) const;
    const uint8_t* start_after(int number, const Team::Member& member) const;
    Prefetch plan_prefetch(int number, int units, const uint8_t* next, const Team::Member& member) const;
    void add(int number, const Matrix& weights, const uint8_t* next, const Activations& in,
             const std::vector<float>& norm, Team::Member& member, float scale = 1.0f);
    void multiply(int number, const Matrix& weights, const uint8_t* next, const Activations& in, int rows, float* out,
                  int64_t stride, bool add, Team::Member& member);

    Model& model_;
    const Forest& forest_;
    Scratch& scratch_;
    const Kernels& kernels_;
    Team& team_;
    float* scores_;
    int stride_;  // floats from one row of x to the next
    int max_slots_;  // the largest number of slots of a session's store
    int num_waves_ = 0;  // three phases each, at most
    int max_states_ = 0;  // the largest number of states of a walk
    bool drops_rows_;  // the last layer's attention, and what follows, runs for wanted rows only
    Activations normalized_, attended_, gated_, recurred_;
    Activations tokens_and_states_;  // each row: its token's embedding, then its state x
};

}  // namespace outpace

// A Llama-family model: one call is a forward over a whole forest of token trees.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "experts.h"
#include "fetch_trial.h"
#include "kernels.h"
#include "matrix.h"
#include "store.h"
#include "team.h"

namespace outpace {

/// An embedding of each token for every layer, left in its file: a row is read where a token of it is in a pass.
struct TokenEmbeddings {
    StoredRows table;  // [tokens, layers * size]
    std::shared_ptr<const void> owner;  // of its data
    std::shared_ptr<const Matrix> projection;  // [layers * size] from hidden; joined with a token's row
    std::vector<float> norm;  // [size], of what is projected

    int size() const { return static_cast<int>(norm.size()); }
};

/// What adds a token's embedding for its layer: output(gelu(gate(x)) * embedding), normalized.
struct EmbeddingBranch {
    std::shared_ptr<const Matrix> gate, output;
    std::vector<float> norm;  // [hidden]
};

/// Norms of a layer that adds an MLP and experts, both of the same state, where the MLP is no shared expert.
struct BranchNorms {
    std::vector<float> router, mlp_output, experts, experts_output;  // [hidden]
};

/// One layer's weights. All norms except `mlp_norm` may be empty. With a `token_norm` (first layer only), the state
/// comes from the spans' inputs, and qkv takes the normalized embedding of each row's token, then the state. A layer
/// with qkv alone stores keys and values and leaves the state as it is. A recurrent layer has no keys and values: `qkv` is
/// its input matrix, and what is said of queries, keys and rows that are seen does not apply.
struct Layer {
    std::vector<float> attention_norm;  // [hidden]; empty: the state is not normalized
    std::vector<float> mlp_norm;
    std::vector<float> query_norm;  // [depth], or [queries * depth] if all heads are normed as one vector
    std::vector<float> key_norm;    // [depth] or [keys * depth]
    std::vector<float> sinks;  // [queries]: a score of each head that has no value
    std::vector<float> attention_output_norm;  // [hidden]: applied to the output of attention before it is added
    std::vector<float> mlp_output_norm;  // applied to the output of the MLP before it is added
    std::vector<float> token_norm;  // [hidden]
    int rotation = 0;  // index of the rotation of queries and keys; negative: no positions
    int window = 0;  // number of tokens that a row sees, itself included; 0: all
    bool is_causal = false;  // a row sees no later rows, whatever the spans say
    std::shared_ptr<const Matrix> qkv;  // [queries, keys, values] from hidden, or from embedding, hidden, each padded
    std::shared_ptr<const Matrix> output;  // hidden from heads, each padded to whole groups of inputs
    std::shared_ptr<const Matrix> gate_up;  // 16 gates, 16 ups, 16 gates, ...; with experts, of the shared one, or null
    std::shared_ptr<const Matrix> down;     // hidden from the gated outputs
    std::shared_ptr<Experts> experts;  // in place of an MLP
    std::shared_ptr<const BranchNorms> branch_norms;  // null: gate_up and down are those of a shared expert
    std::shared_ptr<const EmbeddingBranch> embedding;  // after the MLP, or null
    std::optional<Heads> heads;  // in place of the model's
    int keys_of = -1;  // the earlier layer whose keys and values it reads; negative: its own
    float scale = 1.0f;  // of the state after the layer
    std::shared_ptr<const RecurrentWeights> recurrent;  // null for attention
    std::shared_ptr<const Matrix> strengths;  // of a delta net: its strengths, then its steps, from hidden

    /// Gates and ups of a shared expert, or null.
    const Matrix* shared() const { return experts && !branch_norms ? gate_up.get() : nullptr; }
};

/// Sizes and constants.
struct Shape {
    int hidden;
    int middle;  // outputs of the gate, a multiple of kGroup
    float epsilon;
    Heads heads;
    int rotations = 1;  // number of different rotations of queries and keys
    float embedding_scale = 1.0f;  // factor of embeddings
    Gating gating = Gating::silu;
    Recurrence recurrence{};
    float gate_limit = 0.0f;  // of clamped gating
    float logit_cap = 0.0f;  // logits become cap tanh(logit / cap); 0: they stay

};

/// One session's part of a forest: `tokens` new nodes after `pending` earlier ones after `committed` slots.
/// sees [tokens, pending + tokens]: which pending nodes a node sees (its ancestors and itself).
struct Span {
    Store* store;
    int committed;
    int pending;
    int tokens;
    const bool* sees;
    int position_gap = 0;  // number of committed slots, the last ones, that these nodes do not see
    const float* inputs = nullptr;  // [tokens, hidden]: the first layer's state, instead of the tokens' embeddings
    const float* mlp_bias = nullptr;  // [layers, middle], added to the up projection of each MLP
};

/// Requested hidden states: of these rows, after each of these layers, before the final norm.
struct HiddenRequest {
    const int* rows;
    int num_rows;
    const int* layers;  // 0: the input of the first layer
    int num_layers;
    float* out;  // [num_layers, num_rows, hidden]
};

struct Forest {
    std::vector<Span> spans;
    const int* tokens;   // [rows]
    const float* rope_rows;  // [rows, rotations, depth / 2, 2]: cosine and sine of a pair's angle at the row's position
    int rows;
    const int* wanted;  // rows whose logits are wanted
    int num_wanted;
    // Rising numbers of panels of the output layer: their logits alone are computed, one panel's after the other's; null: all.
    const int* panels = nullptr;
    int num_panels = 0;
    HiddenRequest hidden_request{};
    const bool* skipped = nullptr;  // [layers, 2]: whether the residual skips a layer's attention, its MLP
    // may be empty: called for each wanted row when its logits are complete; must not throw
    std::function<void(int)> after{};
};

class Model {
  public:
    Model(const Shape& shape, std::vector<std::shared_ptr<const Layer>> layers, std::shared_ptr<const Matrix> embedding,
          std::vector<float> norm, std::shared_ptr<const Matrix> head, const Kernels* kernels, int threads,
          std::shared_ptr<const TokenEmbeddings> embeddings = nullptr);

    const Shape& shape() const { return shape_; }
    int num_layers() const { return static_cast<int>(layers_.size()); }
    const Heads& heads(int layer) const { return layers_[layer]->heads ? *layers_[layer]->heads : shape_.heads; }
    int rotation(int layer) const { return layers_[layer]->rotation; }
    /// Floats of a row's rotations, one after the other, each as long as the heads that it turns.
    int rope_floats() const { return rope_starts_.back(); }
    bool takes_states() const { return !layers_.empty() && !layers_[0]->token_norm.empty(); }
    int outputs() const { return head_->outputs(); }
    /// Number of logits of a row; a forest's last panel may be longer than what is left of the output layer.
    int num_logits(const Forest& forest) const { return forest.panels ? forest.num_panels * kPanel : outputs(); }
    const Kernels& kernels() const { return *kernels_; }
    /// The mean number of experts, over the layers with experts, whose weights the last pass read.
    float mean_experts() const { return mean_experts_; }
    int threads() const { return team_.size(); }

    /// Computes logits [num_wanted, num_logits]. Throws std::invalid_argument for wrong sizes. One call at a time runs.
    void forward(const Forest& forest, float* scores);

    /// Takes the accepted nodes of a session into its recurrent states.
    void fold(Store& store);

    /// Computes logits [rows, outputs] of hidden states [rows, hidden] from before the final norm, if there is one.
    void project(const float* hidden, int rows, float* scores);

  private:
    struct Scratch;
    class Pass;

    void check() const;
    void check_recurrent(const Layer& layer) const;
    void check_recurrent(const Span& span, int pending) const;
    void number_layers();
    void find_rotations();
    void check_mlp(const Layer& layer) const;
    void check_embeddings() const;
    void check(const Forest& forest) const;
    void check(const HiddenRequest& request, int rows) const;

    Shape shape_;
    std::vector<std::shared_ptr<const Layer>> layers_;
    std::vector<int> numbers_;  // of each layer among recurrent layers, or of its keys and values among the stored ones
    std::vector<Heads> stored_;  // of the stored keys and values
    std::vector<int> rope_starts_{0};  // of each rotation, and the end
    std::shared_ptr<const Matrix> embedding_, head_;
    std::vector<float> norm_;
    std::shared_ptr<const TokenEmbeddings> embeddings_;  // or null
    const Kernels* kernels_;
    std::shared_ptr<Scratch> scratch_;
    FetchTrial trial_{prefetch_policy()};
    Team team_;
    std::mutex running_;
    std::shared_ptr<WeightArena> arena_;  // of the experts, or null
    float mean_experts_ = 0.0f;
};

}  // namespace outpace

// A Llama-family model: one call is a forward of a whole forest of token trees.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "fetch_trial.h"
#include "kernels.h"
#include "matrix.h"
#include "store.h"
#include "team.h"

namespace outpace {

/// One layer's weights. All norms but the first two may be empty.
struct Layer {
    std::vector<float> attention_norm;  // [hidden]
    std::vector<float> mlp_norm;
    std::vector<float> query_norm;  // [depth]
    std::vector<float> key_norm;
    std::vector<float> mixed_norm;  // [hidden]: what attention gives is normed before it is added
    std::vector<float> fed_norm;    // the same of the MLP
    int rotation = 0;  // by which of the model's queries and keys turn; below 0: they know no positions
    int window = 0;    // tokens that a row sees, itself included; 0: all
    std::shared_ptr<const Matrix> qkv;      // [queries, keys, values] from hidden
    std::shared_ptr<const Matrix> output;   // hidden from heads, each padded to whole groups of inputs
    std::shared_ptr<const Matrix> gate_up;  // 16 gates, 16 ups, 16 gates, ...
    std::shared_ptr<const Matrix> down;     // hidden from the gated outputs
};

/// Sizes and constants.
struct Shape {
    int hidden;
    int middle;  // outputs of gate, a multiple of kGroup
    float epsilon;
    Heads heads;
    int rotations = 1;             // ways in which layers' queries and keys turn
    float embedding_scale = 1.0f;  // by which embeddings are multiplied
    bool is_gelu = false;          // the MLPs' gates go through GELU, else through SiLU

    int turn_floats() const { return rotations * heads.depth; }
};

/// One session's part of a forest: `tokens` new nodes behind `pending` earlier ones behind `committed` slots.
/// sees [tokens, pending + tokens]: node sees pending node (its ancestors and itself).
struct Span {
    Store* store;
    int committed;
    int pending;
    int tokens;
    const bool* sees;
    int gap = 0;                    // so many of the committed slots, the last ones, are not there for these nodes
    const float* inputs = nullptr;  // [tokens, hidden] in place of the tokens' embeddings
    const float* steer = nullptr;   // [layers, middle], added to what each MLP's gate multiplies
};

/// Hidden states that are asked for: of these rows, after so many layers each, before the final norm.
struct Taps {
    const int* rows;
    int num_rows;
    const int* layers;  // 0: what goes into the first layer
    int num_layers;
    float* out;  // [num_layers, num_rows, hidden]
};

struct Forest {
    std::vector<Span> spans;
    const int* tokens;   // [rows]
    const float* turns;  // [rows, rotations, depth / 2, 2]: cosine and sine of each pair's angle at the row's position
    int rows;
    const int* wanted;  // rows whose scores are asked for
    int num_wanted;
    Taps taps{};
    const bool* skipped = nullptr;  // [layers, 2]: the residual passes by a layer's attention, by its MLP
    std::function<void(int)> after{};  // may be empty: what is done with each wanted row's scores; it must not throw
};

class Model {
  public:
    Model(const Shape& shape, std::vector<std::shared_ptr<const Layer>> layers, std::shared_ptr<const Matrix> embedding,
          std::vector<float> norm, std::shared_ptr<const Matrix> head, const Kernels* kernels, int threads);

    const Shape& shape() const { return shape_; }
    int num_layers() const { return static_cast<int>(layers_.size()); }
    int outputs() const { return head_->outputs(); }
    const Kernels& kernels() const { return *kernels_; }
    int threads() const { return team_.size(); }

    /// scores [num_wanted, outputs]. Throws std::invalid_argument for what does not fit. One call at a time runs.
    void forward(const Forest& forest, float* scores);

    /// Scores [rows, outputs] of hidden states [rows, hidden] as they are before the final norm.
    void project(const float* hidden, int rows, float* scores);

  private:
    struct Scratch;
    class Pass;

    void check() const;
    void check(const Forest& forest) const;
    void check(const Taps& taps, int rows) const;

    Shape shape_;
    std::vector<std::shared_ptr<const Layer>> layers_;
    std::shared_ptr<const Matrix> embedding_, head_;
    std::vector<float> norm_;
    const Kernels* kernels_;
    std::shared_ptr<Scratch> scratch_;
    FetchTrial trial_{fetching()};
    Team team_;
    std::mutex running_;
};

}  // namespace outpace

#include "model.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "pass.h"

namespace outpace {
namespace {

void require(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

void require_size(const std::vector<float>& values, std::size_t size, const std::string& name) {
    require(values.size() == size, name + " has " + std::to_string(values.size()) + " entries, expected " +
                                       std::to_string(size));
}

void require_shape(const std::shared_ptr<const Matrix>& matrix, int outputs, int inputs, const std::string& name) {
    require(matrix != nullptr, name + " is missing");
    require(matrix->outputs() == outputs && matrix->inputs() == inputs,
            name + " is [" + std::to_string(matrix->outputs()) + ", " + std::to_string(matrix->inputs()) +
                "], expected [" + std::to_string(outputs) + ", " + std::to_string(inputs) + "]");
}

std::vector<float> padded(std::vector<float> values) {
    values.resize(round_up(static_cast<int>(values.size()), kGroup), 0.0f);
    return values;
}

}  // namespace

Model::Model(const Shape& shape, std::vector<std::shared_ptr<const Layer>> layers,
             std::shared_ptr<const Matrix> embedding, std::vector<float> norm, std::shared_ptr<const Matrix> head,
             const Kernels* kernels, int threads, std::shared_ptr<const TokenEmbeddings> embeddings)
    : shape_(shape),
      layers_(std::move(layers)),
      embedding_(std::move(embedding)),
      head_(std::move(head)),
      norm_(std::move(norm)),
      embeddings_(std::move(embeddings)),
      kernels_(kernels),
      scratch_(std::make_shared<Scratch>()),
      team_(threads) {
    number_layers();
    check();
    find_rotations();
    if (!norm_.empty()) norm_ = padded(norm_);
    for (const auto& layer : layers_) {
        if (!layer->experts) continue;
        require(!arena_ || arena_ == layer->experts->arena(), "the layers' experts are of two arenas");
        arena_ = layer->experts->arena();
    }
}

/// Numbers the recurrent layers, and the layers whose keys and values are stored.
void Model::number_layers() {
    int recurrent = 0;
    for (int layer = 0; layer < num_layers(); ++layer) {
        const int other = layers_[layer]->keys_of;
        require(other < layer, "a layer reads keys of a later one");
        if (layers_[layer]->recurrent) {
            numbers_.push_back(recurrent++);
        } else if (other >= 0) {
            require(layers_[other]->keys_of < 0 && !layers_[other]->recurrent && heads(other).has_slots_of(heads(layer)) &&
                        heads(other).projected && !heads(layer).projected,
                    "a layer cannot read the keys of layer " + std::to_string(other));
            numbers_.push_back(numbers_[other]);
        } else {
            require(heads(layer).projected > 0, "a layer has no keys");
            numbers_.push_back(static_cast<int>(stored_.size()));
            stored_.push_back(heads(layer));
        }
    }
    require(recurrent == shape_.recurrence.layers, std::to_string(recurrent) + " layers are recurrent, expected " +
                                                       std::to_string(shape_.recurrence.layers));
}

/// Finds where each rotation begins: one that no layer uses is as long as the model's heads.
void Model::find_rotations() {
    std::vector<int> depths(shape_.rotations, 0);
    for (int layer = 0; layer < num_layers(); ++layer) {
        if (layers_[layer]->recurrent || layers_[layer]->rotation < 0) continue;
        int& depth = depths[layers_[layer]->rotation];
        require(!depth || depth == heads(layer).depth, "a rotation is of heads of two sizes");
        depth = heads(layer).depth;
    }
    for (int depth : depths) rope_starts_.push_back(rope_starts_.back() + (depth ? depth : shape_.heads.depth));
}

void Model::check() const {
    require(shape_.rotations >= 1, "rotations is out of range");
    require(embedding_ && embedding_->inputs() == shape_.hidden, "embedding does not fit");
    require(head_ && head_->inputs() == shape_.hidden, "head does not fit");
    if (!norm_.empty()) require_size(norm_, shape_.hidden, "norm");
    for (const auto& layer : layers_) {
        const int stride = round_up(shape_.hidden, kGroup);
        const bool takes_states = !layer->token_norm.empty();
        require(!takes_states || layer == layers_[0], "token_norm is for the first layer");
        require_size(layer->mlp_norm, stride, "mlp_norm");
        for (const auto* norm : {&layer->attention_norm, &layer->token_norm, &layer->attention_output_norm,
                                 &layer->mlp_output_norm})
            if (!norm->empty()) require_size(*norm, stride, "a norm of the hidden state");
        if (layer->recurrent) {
            check_recurrent(*layer);
            continue;
        }
        const Heads& heads = layer->heads ? *layer->heads : shape_.heads;
        require(heads.depth >= 2 && heads.depth <= kDepthMax && heads.depth % 2 == 0, "depth is out of range");
        require(heads.keys >= 1 && heads.queries % heads.keys == 0, "queries is no multiple of keys");
        require(layer->rotation < shape_.rotations, "rotation is out of range");
        require(layer->window >= 0, "window is below 0");
        const bool is_joint = static_cast<int>(layer->query_norm.size()) > heads.depth;
        require(!is_joint || heads.keys * heads.depth % kLanes == 0, "queries or keys that are normed as one have no whole lanes");
        if (!layer->query_norm.empty()) require_size(layer->query_norm, heads.depth * (is_joint ? heads.queries : 1), "query_norm");
        if (!layer->key_norm.empty()) require_size(layer->key_norm, heads.depth * (is_joint ? heads.keys : 1), "key_norm");
        if (!layer->sinks.empty()) require_size(layer->sinks, heads.queries, "sinks");
        require_shape(layer->qkv, heads.outputs(), takes_states ? 2 * stride : shape_.hidden, "qkv");
        if (!layer->output) continue;
        require_shape(layer->output, shape_.hidden, heads.queries * heads.head_groups() * kGroup, "output");
        check_mlp(*layer);
    }
    if (embeddings_) check_embeddings();
}

void Model::check_embeddings() const {
    const int size = embeddings_->size();
    require(size >= 1 && size <= kEmbeddedMax, "the size of embeddings for layers is out of range");
    require(embeddings_->table.rows == embedding_->outputs(), "embeddings for layers have other tokens");
    require_shape(embeddings_->projection, num_layers() * size, shape_.hidden, "projection");
    for (const auto& layer : layers_) {
        require(layer->embedding != nullptr, "a layer takes no embedding");
        require_shape(layer->embedding->gate, size, shape_.hidden, "gate of embeddings");
        require_shape(layer->embedding->output, shape_.hidden, size, "output of embeddings");
        require_size(layer->embedding->norm, round_up(shape_.hidden, kGroup), "norm of embeddings");
    }
}

void Model::check_mlp(const Layer& layer) const {
    require(layer.scale == 1.0f || !layer.mlp_output_norm.empty(), "a layer with a scale has no output norm");
    if (layer.branch_norms) {
        require(layer.experts && layer.gate_up && shape_.hidden % kLanes == 0 && !layer.mlp_output_norm.empty(),
                "a layer has no two branches");
        const BranchNorms& norms = *layer.branch_norms;
        for (const auto* norm : {&norms.router, &norms.mlp_output, &norms.experts, &norms.experts_output})
            require_size(*norm, round_up(shape_.hidden, kGroup), "a norm of a branch");
    }
    if (layer.experts) {
        const Router& router = layer.experts->router();
        require(layer.experts->hidden() == shape_.hidden && router.inputs == shape_.hidden, "experts do not fit");
        require(!router.gates_shared || layer.gate_up, "the gate of a shared expert has none");
        require(router.scales.empty() || static_cast<int>(router.scales.size()) == router.experts, "scales do not fit");
        if (!layer.gate_up) return;
    }
    const int middle = layer.gate_up ? layer.gate_up->outputs() / 2 : 0;
    require(middle % kGroup == 0, "middle is no multiple of the group");
    require(middle <= shape_.middle || layer.experts, "middle is too large");
    require_shape(layer.gate_up, 2 * middle, shape_.hidden, "gate_up");
    require_shape(layer.down, shape_.hidden, middle, "down");
}

void Model::check_recurrent(const Layer& layer) const {
    const Recurrence& sizes = shape_.recurrence;
    const RecurrentWeights& weights = *layer.recurrent;
    require(sizes.filter_length >= 1 && sizes.channels >= kLanes && sizes.channels % kLanes == 0,
            "channels is " + std::to_string(sizes.channels) + ", expected a multiple of " + std::to_string(kLanes));
    require_size(weights.filters, static_cast<std::size_t>(sizes.filter_length) * sizes.channels, "filters");
    require_shape(layer.qkv, sizes.inputs_end(), shape_.hidden, "input");
    require_shape(layer.output, shape_.hidden, sizes.output_groups() * kGroup, "output");
    check_mlp(layer);
    if (!sizes.is_delta_net()) return;
    for (int depth : {sizes.key_depth, sizes.value_depth})
        require(depth >= kLanes && depth <= kDepthMax && depth % kLanes == 0,
                "the depth of a delta net's head is " + std::to_string(depth) + ", expected a multiple of " +
                    std::to_string(kLanes) + " up to " + std::to_string(kDepthMax));
    require(sizes.key_heads >= 1 && sizes.value_heads % sizes.key_heads == 0, "value_heads is no multiple of key_heads");
    require(sizes.channels == 2 * sizes.key_width() + sizes.value_width(), "channels is not the sum of the heads");
    for (const auto* values : {&weights.rates, &weights.time_bias}) require_size(*values, sizes.value_heads, "rates");
    require_size(weights.norm, sizes.value_depth, "norm");
    require_shape(layer.strengths, 2 * sizes.value_heads, shape_.hidden, "strengths");
}

void Model::check_recurrent(const Span& span, int pending) const {
    require(span.store->states() && span.store->states()->sizes() == shape_.recurrence, "a store is of another model");
    require(span.pending == pending, "a span has " + std::to_string(span.pending) + " pending nodes, its states have " +
                                         std::to_string(pending));
    require(!span.position_gap, "recurrent states cannot leave out committed tokens");
    const int columns = span.pending + span.tokens;
    for (int node = 0; node < span.tokens; ++node)
        for (int other = span.pending + node + 1; other < columns; ++other)
            require(!span.sees[static_cast<int64_t>(node) * columns + other], "a node sees a later one");
}

void Model::check(const Forest& forest) const {
    int rows = 0, pending = 0;
    const Store* before = nullptr;
    for (const Span& span : forest.spans) {
        if (shape_.recurrence.layers) {
            if (span.store != before) pending = span.store->states() ? span.store->states()->pending() : 0;
            check_recurrent(span, pending);
            before = span.store;
            pending += span.tokens;
        }
        require(std::equal(stored_.begin(), stored_.end(), span.store->heads().begin(), span.store->heads().end(),
                           [](const Heads& own, const Heads& other) { return own.has_slots_of(other); }),
                "a store is of another model");
        require(span.committed >= 0 && span.pending >= 0 && span.tokens >= 0 &&
                    span.committed + span.pending + span.tokens <= span.store->slots(),
                "a span does not fit its store");
        require(span.position_gap >= 0 && span.position_gap <= span.committed, "a gap is longer than what is committed");
        require(!takes_states() || span.inputs || !span.tokens, "inputs are missing");
        require(!arena_ || !span.mlp_bias, "experts take no biases of a pass");
        for (int node = 0; node < span.tokens; ++node)
            require(span.sees[static_cast<int64_t>(node) * (span.pending + span.tokens) + span.pending + node],
                    "a node does not see itself");
        rows += span.tokens;
    }
    require(rows == forest.rows, "the spans do not add up to the rows");
    for (int row = 0; row < rows; ++row) {
        const int token = forest.tokens[row];
        require(token >= 0 && token < embedding_->outputs(), "token " + std::to_string(token) + " is out of range");
    }
    for (int i = 0; i < forest.num_wanted; ++i)
        require(forest.wanted[i] >= 0 && forest.wanted[i] < rows, "a wanted row is out of range");
    require(forest.num_wanted <= rows, "more rows are wanted than there are");
    for (int i = 0; i < forest.num_panels; ++i)
        require(forest.panels[i] > (i ? forest.panels[i - 1] : -1) && forest.panels[i] < head_->panels().count(),
                "a panel is out of range or out of order");
    check(forest.hidden_request, rows);
}

void Model::check(const HiddenRequest& request, int rows) const {
    for (int i = 0; i < request.num_rows; ++i)
        require(request.rows[i] >= 0 && request.rows[i] < rows, "a row of hidden states is out of range");
    for (int i = 0; i < request.num_layers; ++i)
        require(request.layers[i] >= 0 && request.layers[i] <= num_layers(),
                "layer " + std::to_string(request.layers[i]) + " is out of range");
}

void Model::forward(const Forest& forest, float* scores) {
    check(forest);
    if (forest.rows == 0) return;
    std::lock_guard<std::mutex> alone(running_);
    std::unique_lock<std::mutex> packing;
    if (arena_) packing = std::unique_lock(arena_->running());
    Pass pass(*this, forest, scores);
    team_.run(pass.phases(), [&](Team::Member& member) { pass.run(member); });
    if (arena_) pass.end_experts();
    if (shape_.recurrence.layers)
        for (const Span& span : forest.spans) span.store->states()->end_folds();
}

void Model::fold(Store& store) {
    require(store.states() && store.states()->sizes() == shape_.recurrence, "a store is of another model");
    Forest forest{};
    forest.spans.push_back({&store, 0, store.states()->pending(), 0, nullptr});
    std::lock_guard<std::mutex> alone(running_);
    Pass pass(*this, forest, nullptr);
    team_.run(pass.phases(), [&](Team::Member& member) { pass.fold(member); });
    store.states()->end_folds();
}

void Model::project(const float* hidden, int rows, float* scores) {
    if (rows == 0) return;
    Forest forest{};
    forest.rows = rows;
    std::lock_guard<std::mutex> alone(running_);
    Pass pass(*this, forest, scores);
    team_.run(pass.phases(), [&](Team::Member& member) { pass.project(hidden, member); });
}

}  // namespace outpace

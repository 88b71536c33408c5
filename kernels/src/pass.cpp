#include "pass.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "walk.h"

namespace outpace {
namespace {

/// Returns the largest number of queries of a tile when `each` queries are left for every member. Tiles are whole only
/// while every member can have several.
int max_queries(int each, int whole) {
    constexpr int kFew = 4;
    return each >= 2 * whole ? whole : std::clamp(each, 1, std::min(whole, kFew));
}

}  // namespace

Activations ActivationBuffer::view(int rows, int groups) {
    const std::size_t count = static_cast<std::size_t>(rows) * groups;
    values.reserve(count * kGroup);
    facts.reserve(count);
    return {values.data(), facts.data(), rows, groups};
}

Model::Pass::Pass(Model& model, const Forest& forest, float* scores)
    : model_(model),
      forest_(forest),
      scratch_(*model.scratch_),
      kernels_(*model.kernels_),
      team_(model.team_),
      scores_(scores),
      stride_(round_up(model.shape_.hidden, kGroup)),
      max_slots_(0),
      drops_rows_(can_drop_rows()) {
    const Shape& shape = model.shape_;
    const int rows = forest.rows;
    scratch_.x.reserve(static_cast<std::size_t>(rows) * stride_);
    const int layers = model.num_layers();
    int outputs = std::max(shape.heads.outputs(), shape.recurrence.outputs()), head_groups = 0;
    for (int number = 0; number < layers; ++number) {
        const Heads& heads = model.heads(number);
        outputs = std::max(outputs, heads.outputs());
        head_groups = std::max(head_groups, heads.queries * heads.head_groups());
    }
    if (const TokenEmbeddings* embeddings = model.embeddings_.get()) {
        outputs = std::max(outputs, embeddings->size());
        scratch_.embeddings.reserve(static_cast<std::size_t>(rows) * layers * embeddings->size());
        scratch_.table.reserve(static_cast<std::size_t>(rows) * round_up(layers * embeddings->size(), kGroup));
    }
    scratch_.mixed.reserve(static_cast<std::size_t>(rows) * outputs);
    const auto has_output_norm = [](const auto& layer) {
        return !layer->attention_output_norm.empty() || !layer->mlp_output_norm.empty();
    };
    if (std::any_of(model.layers_.begin(), model.layers_.end(), has_output_norm))
        scratch_.branch.reserve(static_cast<std::size_t>(rows) * stride_);
    const int groups = stride_ / kGroup;
    if (model.takes_states()) {
        scratch_.tokens.reserve(static_cast<std::size_t>(rows) * stride_);
        tokens_and_states_ = scratch_.normalized.view(rows, 2 * groups);
    }
    normalized_ = scratch_.normalized.view(rows, groups);
    const bool has_states = shape.recurrence.layers > 0;
    const int recurrent_groups = has_states ? shape.recurrence.output_groups() : 0;
    attended_ = recurred_ = scratch_.attended.view(rows, std::max(head_groups, recurrent_groups));
    recurred_.groups = recurrent_groups;
    gated_ = scratch_.gated.view(rows, shape.middle / kGroup);
    model.trial_.begin_pass();
    find_visible_slots();
    find_mlp_biases();
    scratch_.tiles.clear();
    for (int number = 0; number < layers; ++number) {
        const Heads& heads = model.heads(number);
        if (model.layers_[number]->recurrent) continue;
        if (static_cast<int>(scratch_.tiles.size()) <= heads.keys) scratch_.tiles.resize(heads.keys + 1);
        if (scratch_.tiles[heads.keys].empty())
            make_tiles(heads, static_cast<int>(scratch_.row_spans.size()), scratch_.tiles[heads.keys]);
    }
    for (const Span& span : forest.spans) max_slots_ = std::max(max_slots_, span.store->slots());
    scratch_.scores.reserve(static_cast<std::size_t>(team_.size()) * kernels_.tile_queries * max_slots_);
    scratch_.stores.clear();
    for (int number = 0; number < layers; ++number)
        for (const Span& span : forest.spans)
            scratch_.stores.push_back(model.layers_[number]->recurrent ? KeyValues{}
                                                                       : span.store->layer(model.numbers_[number]));
    if (has_states) plan_walks();
    if (model.arena_) plan_experts();
}

/// Plans how the recurrent layers go through each session's tree. Adjacent spans of one store are one tree.
void Model::Pass::plan_walks() {
    const auto& spans = forest_.spans;
    for (auto* list : {&scratch_.places, &scratch_.earlier, &scratch_.folds}) list->clear();
    scratch_.steps.clear();
    scratch_.sequences.clear();
    for (std::size_t first = 0, end; first < spans.size(); first = end) {
        for (end = first + 1; end < spans.size() && spans[end].store == spans[first].store;) ++end;
        plan_walk(first, end);
    }
    const int space = kStateVectors * kLanes * recurrence().key_depth * max_states_;
    scratch_.states.reserve(static_cast<std::size_t>(team_.size()) * space);
}

void Model::Pass::plan_walk(std::size_t first_span, std::size_t end_span) {
    const int first_new = forest_.spans[first_span].pending, kept = recurrence().filter_length - 1;
    const int first_row = static_cast<int>(scratch_.places.size());
    States& states = *forest_.spans[first_span].store->states();
    int rows = 0;
    for (std::size_t number = first_span; number < end_span; ++number) rows += forest_.spans[number].tokens;
    states.add(rows);
    const std::vector<int>& places = states.places();
    WalkedTree tree{std::vector<int>(first_new + rows, kUnused), first_new, first_row};
    for (std::size_t number = first_span; number < end_span; ++number) {
        const Span& span = forest_.spans[number];
        for (int node = 0; node < span.tokens; ++node) {
            const int own = span.pending + node;
            const bool* sees = span.sees + static_cast<int64_t>(node) * (span.pending + span.tokens);
            int found = 0, child = own;  // number of ancestors, and the last one
            for (int other = own - 1; other >= 0; --other) {
                if (!sees[other]) continue;
                if (found++ < kept) scratch_.earlier.push_back(places[other]);
                tree.parents[child] = other;
                child = other;
            }
            tree.parents[child] = -1;
            for (int n = found; n < kept; ++n) scratch_.earlier.push_back(found - 1 - n);
            scratch_.places.push_back(places[own]);
        }
    }
    const std::vector<int>& folds = states.folds();
    const int first_fold = static_cast<int>(scratch_.folds.size()), first_step = static_cast<int>(scratch_.steps.size());
    scratch_.folds.insert(scratch_.folds.end(), folds.begin(), folds.end());
    if (recurrence().is_delta_net()) max_states_ = std::max(max_states_, add_walk(tree, places, folds, scratch_.steps));
    scratch_.sequences.push_back({states.state(), states.stash(), first_row, rows, first_step,
                                  static_cast<int>(scratch_.steps.size()) - first_step, first_fold,
                                  static_cast<int>(folds.size())});
}

/// Finds the slots that each row sees: committed slots and its ancestors. Ancestors that follow without a gap extend
/// the run.
void Model::Pass::find_visible_slots() {
    scratch_.slots.clear();
    scratch_.row_spans.clear();
    scratch_.more.clear();
    scratch_.visible_slots.clear();
    for (std::size_t number = 0; number < forest_.spans.size(); ++number) {
        const Span& span = forest_.spans[number];
        const int columns = span.pending + span.tokens;
        for (int node = 0; node < span.tokens; ++node) {
            const bool* sees = span.sees + static_cast<int64_t>(node) * columns;
            int gapless = 0;
            while (!span.position_gap && gapless < columns && sees[gapless]) ++gapless;
            const std::size_t before = scratch_.more.size();
            for (int other = gapless; other < columns; ++other)
                if (sees[other]) scratch_.more.push_back(span.committed + other);
            const int num_more = static_cast<int>(scratch_.more.size() - before);
            const int before_all = span.committed - span.position_gap;
            const auto num_visible = std::count(sees, sees + span.pending + node + 1, true);
            scratch_.visible_slots.push_back(
                {0, before_all + gapless, num_more, nullptr, before_all + static_cast<int>(num_visible)});
            scratch_.slots.push_back(span.committed + span.pending + node);
            scratch_.row_spans.push_back(static_cast<int>(number));
        }
    }
    const int* more = scratch_.more.data();
    for (VisibleSlots& visible : scratch_.visible_slots) {
        visible.more = more;
        more += visible.num_more;
    }
}

/// Finds the MLP biases of each row; empty if no row has one.
void Model::Pass::find_mlp_biases() {
    scratch_.mlp_biases.clear();
    bool has_bias = false;
    for (const Span& span : forest_.spans) {
        scratch_.mlp_biases.insert(scratch_.mlp_biases.end(), span.tokens, span.mlp_bias);
        has_bias |= span.mlp_bias != nullptr;
    }
    if (!has_bias) scratch_.mlp_biases.clear();
}

/// Divides the queries into tiles that share keys; the last tiles are small, so that all members end together.
void Model::Pass::make_tiles(const Heads& heads, int rows, std::vector<QueryTile>& tiles) {
    int left = rows * heads.queries;
    tiles.clear();
    for (int row = 0, end; row < rows; row = end) {
        const int number = scratch_.row_spans[row];
        for (end = row + 1; end < rows && scratch_.row_spans[end] == number;) ++end;
        const int first = row * heads.group(), last = end * heads.group();
        for (int head = 0; head < heads.keys; ++head)
            for (int query = first, count; query < last; query += count, left -= count) {
                const int each = left / team_.size(), limit = max_queries(each, kernels_.tile_queries);
                count = std::min(limit, last - query);
                tiles.push_back({number, head, query, count, query == first});
            }
    }
}

/// Whether after the last layer's keys and values only the logits of some rows are needed.
bool Model::Pass::can_drop_rows() const {
    const HiddenRequest& request = forest_.hidden_request;
    const int layers = model_.num_layers(), *wanted = forest_.wanted, *end = wanted + forest_.num_wanted;
    if (!layers || forest_.num_wanted == forest_.rows || skips(layers - 1, 0)) return false;
    if (!model_.layers_[layers - 1]->output || model_.layers_[layers - 1]->recurrent) return false;
    if (std::count(request.layers, request.layers + request.num_layers, layers)) return false;
    return std::adjacent_find(wanted, end, std::greater_equal<int>()) == end;
}

/// Moves the wanted rows to the front and drops the others.
void Model::Pass::drop_rows() {
    const Heads& heads = model_.heads(model_.num_layers() - 1);
    const int outputs = heads.outputs(), rows = forest_.num_wanted;
    const int size = model_.embeddings_ ? model_.num_layers() * model_.embeddings_->size() : 0;
    float *x = scratch_.x.data(), *mixed = scratch_.mixed.data();
    for (int to = 0; to < rows; ++to) {
        const int from = forest_.wanted[to];
        if (from == to) continue;
        std::copy_n(x + static_cast<int64_t>(from) * stride_, stride_, x + static_cast<int64_t>(to) * stride_);
        std::copy_n(mixed + static_cast<int64_t>(from) * outputs, outputs, mixed + static_cast<int64_t>(to) * outputs);
        float* embeddings = scratch_.embeddings.data();
        if (size) std::copy_n(embeddings + static_cast<int64_t>(from) * size, size, embeddings + static_cast<int64_t>(to) * size);
        scratch_.visible_slots[to] = scratch_.visible_slots[from];
        scratch_.row_spans[to] = scratch_.row_spans[from];
        if (!scratch_.mlp_biases.empty()) scratch_.mlp_biases[to] = scratch_.mlp_biases[from];
    }
    make_tiles(heads, rows, scratch_.last_tiles);
}

void Model::Pass::run(Team::Member& member) {
    team_.share(member, forest_.rows, [&](int row) { embed(row); });
    if (model_.embeddings_) join_embeddings(member);
    FetchTrial* const trial = member.number == 0 && model_.trial_.wants(forest_.rows) ? &model_.trial_ : nullptr;
    for (int number = 0; number < model_.num_layers(); ++number) {
        copy_hidden(number, member);
        const auto begin = trial ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point{};
        if (model_.layers_[number]->recurrent)
            run_recurrent(number, skips(number, 0), member);
        else if (!skips(number, 0))
            run_attention(number, member);
        if (model_.layers_[number]->output && !skips(number, 1)) run_mlp(number, member);
        if (model_.layers_[number]->output && model_.embeddings_) add_embedding(number, member);
        if (trial && !skips(number, 0) && !skips(number, 1)) trial->note(number, std::chrono::steady_clock::now() - begin);
    }
    copy_hidden(model_.num_layers(), member);
    score(drops_rows_ ? nullptr : forest_.wanted, forest_.num_wanted, member);
    if (forest_.after) team_.share(member, forest_.num_wanted, forest_.after);
}

void Model::Pass::fold(Team::Member& member) {
    for (int number = 0; number < model_.num_layers(); ++number)
        if (model_.layers_[number]->recurrent) run_recurrent(number, true, member);
}

void Model::Pass::project(const float* hidden, Team::Member& member) {
    const int size = model_.shape_.hidden;
    team_.share(member, forest_.rows, [&](int row) { copy_input(hidden + static_cast<int64_t>(row) * size, row); });
    score(nullptr, forest_.rows, member);
}

/// Computes logits of these rows of x, or of the first `count` rows if `rows` is null.
void Model::Pass::score(const int* rows, int count, Team::Member& member) {
    if (count == 0) return;
    const Matrix& head = *model_.head_;
    normalize(model_.norm_, in_form_for(head, normalized_), rows, count, member);
    if (!forest_.panels) {
        multiply(model_.num_layers(), head, start_of(head, member), normalized_, count, scores_, model_.outputs(), false, member);
        return cap_logits(count, member);
    }
    const Product all{head.panels(),
                      plan_prefetch(model_.num_layers(), forest_.num_panels, start_of(head, member), member),
                      in_form_for(head, normalized_),
                      count,
                      scores_,
                      model_.num_logits(forest_),
                      false};
    team_.share(member, forest_.num_panels, [&](int unit) {
        const int panel = forest_.panels[unit];
        Product task = all;
        task.out += static_cast<int64_t>(unit - panel) * kPanel;
        kernels_.product(task, panel);
    });
    cap_logits(count, member);
}

void Model::Pass::cap_logits(int rows, Team::Member& member) {
    const CapLogits task{scores_, model_.num_logits(forest_), model_.shape_.logit_cap};
    if (task.cap > 0.0f) team_.share(member, rows * task.units_a_row(), [&](int unit) { kernels_.cap_logits(task, unit); });
}

void Model::Pass::embed(int row) {
    const Span& span = forest_.spans[scratch_.row_spans[row]];
    const int64_t node = scratch_.slots[row] - span.committed - span.pending;
    if (span.inputs) copy_input(span.inputs + node * model_.shape_.hidden, row);
    if (span.inputs && !model_.takes_states()) return;
    float* x = (span.inputs ? scratch_.tokens : scratch_.x).data() + static_cast<int64_t>(row) * stride_;
    model_.embedding_->row(forest_.tokens[row], x);
    const float scale = model_.shape_.embedding_scale;
    if (scale != 1.0f)
        for (int i = 0; i < stride_; ++i) x[i] *= scale;
}

/// Computes the embeddings of all rows for all layers from the tokens' rows of the table and the first state.
void Model::Pass::join_embeddings(Team::Member& member) {
    const TokenEmbeddings& embeddings = *model_.embeddings_;
    const int layers = model_.num_layers(), size = embeddings.size(), stride = round_up(layers * size, kGroup);
    float *x = scratch_.embeddings.data(), *table = scratch_.table.data();
    const StoredRows& rows = embeddings.table;
    team_.share(member, forest_.rows, [&](int row) {
        read_row(rows.format, rows.data + forest_.tokens[row] * rows.row_bytes, layers * size,
                 table + static_cast<int64_t>(row) * stride);
    });
    normalize({}, in_form_for(*embeddings.projection, normalized_), nullptr, forest_.rows, member);
    multiply(0, *embeddings.projection, start_of(*model_.layers_[0]->qkv, member), normalized_, forest_.rows, x,
             layers * size, false, member);
    const float root = std::sqrt(static_cast<float>(model_.shape_.hidden));
    const JoinEmbeddings task{x,    table, stride, embeddings.norm.data(), layers, size, model_.shape_.epsilon,
                              1.0f / root, std::sqrt(static_cast<float>(size))};
    team_.share(member, forest_.rows, [&](int row) { kernels_.join_embeddings(task, row); });
}

/// Adds what a layer makes of its embedding of each row.
void Model::Pass::add_embedding(int number, Team::Member& member) {
    const Layer& layer = *model_.layers_[number];
    const EmbeddingBranch& branch = *layer.embedding;
    const int rows = num_rows_after(number), size = model_.embeddings_->size();
    normalize({}, in_form_for(*branch.gate, normalized_), nullptr, rows, member);
    float* gates = scratch_.mixed.data();
    multiply(number, *branch.gate, start_of(*branch.output, member), normalized_, rows, gates, size, false, member);
    Activations gated = attended_;
    gated.groups = round_up(size, kGroup) / kGroup;
    const GateRow task{gates, scratch_.embeddings.data() + static_cast<int64_t>(number) * size,
                       static_cast<int64_t>(model_.num_layers()) * size, size, in_form_for(*branch.output, gated),
                       model_.shape_.gating};
    team_.share(member, rows, [&](int row) { kernels_.gate_row(task, row); });
    add(number, *branch.output, start_after(number, member), gated, branch.norm, member, layer.scale);
}

/// Copies a row of x from the input; its padding is zero.
void Model::Pass::copy_input(const float* hidden, int row) {
    const int size = model_.shape_.hidden;
    float* x = scratch_.x.data() + static_cast<int64_t>(row) * stride_;
    std::copy_n(hidden, size, x);
    std::fill(x + size, x + stride_, 0.0f);
}

/// Copies the requested hidden states after this number of layers.
void Model::Pass::copy_hidden(int number, Team::Member& member) {
    const HiddenRequest& request = forest_.hidden_request;
    const int size = model_.shape_.hidden;
    for (int place = 0; place < request.num_layers; ++place) {
        if (request.layers[place] != number) continue;
        float* out = request.out + static_cast<int64_t>(place) * request.num_rows * size;
        const float* x = scratch_.x.data();
        team_.share(member, request.num_rows, [&](int i) {
            const float* row = x + static_cast<int64_t>(request.rows[i]) * stride_;
            std::copy_n(row, size, out + static_cast<int64_t>(i) * size);
        });
    }
}

/// Runs a layer's attention.
void Model::Pass::run_attention(int number, Team::Member& member) {
    const Layer& layer = *model_.layers_[number];
    const Heads& heads = model_.heads(number);
    const KeyValues* spans = scratch_.stores.data() + number * forest_.spans.size();
    const bool takes_states = !layer.token_norm.empty();
    if (takes_states)
        normalize_tokens_and_states(layer, member);
    else
        normalize(layer.attention_norm, in_form_for(*layer.qkv, normalized_), nullptr, forest_.rows, member);
    multiply(number, *layer.qkv, start_of(layer.output ? *layer.output : *layer.qkv, member),
             takes_states ? tokens_and_states_ : normalized_, forest_.rows, scratch_.mixed.data(),
             heads.outputs(), false, member);
    rotate(number, spans, member);
    if (!layer.output) return;
    if (drops_rows(number)) team_.share(member, 1, [&](int) { drop_rows(); });
    Activations attended = attended_;
    attended.groups = heads.queries * heads.head_groups();
    attend(number, in_form_for(*layer.output, attended), spans, member);
    add(number, *layer.output, start_of_mlp(layer, member), attended, layer.attention_output_norm, member);
}

/// Runs a layer's delta net or short convolution; with `folds_only`, only its states take the accepted nodes in.
void Model::Pass::run_recurrent(int number, bool folds_only, Team::Member& member) {
    const Layer& layer = *model_.layers_[number];
    const Recurrence& sizes = recurrence();
    const int rows = forest_.rows, stride = sizes.outputs();
    float* mixed = scratch_.mixed.data();
    if (!folds_only) {
        const int panels = layer.qkv->panels().count(), more = layer.strengths ? layer.strengths->panels().count() : 0;
        Activations in = in_form_for(*layer.qkv, normalized_);
        in.by_quarters = in.by_quarters && (!more || layer.strengths->takes_quarters());
        normalize(layer.attention_norm, in, nullptr, rows, member);
        const Prefetch prefetch = plan_prefetch(number, panels + more, start_of(*layer.output, member), member);
        const Product inputs{layer.qkv->panels(), prefetch, in, rows, mixed, stride, false};
        Product strengths = inputs;
        if (more) strengths.weights = layer.strengths->panels(), strengths.out = mixed + sizes.inputs_end();
        team_.share(member, panels + more, [&](int panel) {
            panel < panels ? kernels_.product(inputs, panel) : kernels_.product(strengths, panel - panels);
        });
    }
    const Recur task{sizes,
                     *layer.recurrent,
                     model_.numbers_[number],
                     model_.shape_.epsilon,
                     mixed,
                     stride,
                     scratch_.sequences.data(),
                     scratch_.places.data(),
                     scratch_.earlier.data(),
                     scratch_.steps.data(),
                     scratch_.folds.data(),
                     folds_only,
                     in_form_for(*layer.output, recurred_)};
    float* states = scratch_.states.data() +
                    static_cast<int64_t>(member.number) * kStateVectors * kLanes * sizes.key_depth * max_states_;
    team_.share(member, static_cast<int>(scratch_.sequences.size()) * sizes.units(),
                [&](int unit) { kernels_.recur(task, unit, states); });
    if (!folds_only) add(number, *layer.output, start_of_mlp(layer, member), task.out, layer.attention_output_norm, member);
}

/// Runs a layer's MLP.
void Model::Pass::run_mlp(int number, Team::Member& member) {
    const Layer& layer = *model_.layers_[number];
    if (layer.experts) return run_experts(number, member);
    Activations gated = gated_;
    gated.groups = layer.gate_up->outputs() / 2 / kGroup;
    gate(layer, number, num_rows_after(number), gated, member);
    add(number, *layer.down, start_after(number, member), gated, layer.mlp_output_norm, member,
        layer.embedding ? 1.0f : layer.scale);
}

/// Computes the gated inputs of an MLP's output matrix.
void Model::Pass::gate(const Layer& layer, int number, int rows, const Activations& out, Team::Member& member) {
    const int middle = model_.shape_.middle;
    normalize(layer.mlp_norm, in_form_for(*layer.gate_up, normalized_), nullptr, rows, member);
    const GatedProduct task{layer.gate_up->panels(), plan_prefetch(number, out.groups, start_of(*layer.down, member), member),
                            in_form_for(*layer.gate_up, normalized_), rows, in_form_for(*layer.down, out),
                            scratch_.mlp_biases.empty() ? nullptr : scratch_.mlp_biases.data(),
                            static_cast<int64_t>(number) * middle, model_.shape_.gating, model_.shape_.gate_limit};
    team_.share(member, out.groups, [&](int group) { kernels_.gated_product(task, group); });
}

/// Adds a product to the residual, normalized first if there is a norm for it.
void Model::Pass::add(int number, const Matrix& weights, const uint8_t* next, const Activations& in,
                      const std::vector<float>& norm, Team::Member& member, float scale) {
    const int rows = num_rows_after(number);
    float *x = scratch_.x.data(), *branch = scratch_.branch.data();
    multiply(number, weights, next, in, rows, norm.empty() ? x : branch, stride_, norm.empty(), member);
    if (norm.empty()) return;
    const AddNormed task{x, branch, norm.data(), model_.shape_.hidden, stride_, model_.shape_.epsilon, scale};
    team_.share(member, rows, [&](int row) { kernels_.add_normed(task, row); });
}

void Model::Pass::rotate(int number, const KeyValues* spans, Team::Member& member) {
    const Layer& layer = *model_.layers_[number];
    const Heads& heads = model_.heads(number);
    const bool is_joint = static_cast<int>(layer.query_norm.size()) > heads.depth;
    if (is_joint) {
        const NormRows queries{scratch_.mixed.data(), heads.outputs(), layer.query_norm.data(),
                               heads.queries * heads.depth, heads.epsilon};
        const NormRows keys{queries.x + queries.size, heads.outputs(), layer.key_norm.data(), heads.keys * heads.depth,
                            heads.epsilon};
        team_.share(member, 2 * forest_.rows, [&](int unit) { kernels_.norm_rows(unit % 2 ? keys : queries, unit / 2); });
    }
    const Rotate task{heads,
                      forest_.rows,
                      scratch_.mixed.data(),
                      layer.rotation < 0 ? nullptr : forest_.rope_rows + model_.rope_starts_[layer.rotation],
                      model_.rope_floats(),
                      layer.query_norm.empty() || is_joint ? nullptr : layer.query_norm.data(),
                      layer.key_norm.empty() || is_joint ? nullptr : layer.key_norm.data(),
                      scratch_.slots.data(),
                      scratch_.row_spans.data(),
                      spans};
    team_.share(member, task.units(), [&](int unit) { kernels_.rotate(task, unit); });
}

void Model::Pass::attend(int number, const Activations& out, const KeyValues* spans, Team::Member& member) {
    const Layer& layer = *model_.layers_[number];
    const Heads& heads = model_.heads(number);
    const std::vector<QueryTile>& tiles = drops_rows(number) ? scratch_.last_tiles : scratch_.tiles[heads.keys];
    const Attend task{heads, scratch_.mixed.data(), scratch_.visible_slots.data(), spans, tiles.data(), out,
                      layer.window, layer.is_causal,
                      layer.sinks.empty() ? nullptr : layer.sinks.data()};
    const int64_t size = static_cast<int64_t>(kernels_.tile_queries) * max_slots_;
    float* scores = scratch_.scores.data() + member.number * size;
    team_.share(member, static_cast<int>(tiles.size()), [&](int tile) { kernels_.attend(task, tile, scores); });
}

/// Normalizes the input of a product.
void Model::Pass::normalize(const std::vector<float>& norm, const Activations& out, const int* rows, int count,
                            Team::Member& member, float* normed) {
    const Shape& shape = model_.shape_;
    const float* weight = norm.empty() ? nullptr : norm.data();
    const Normalize task{scratch_.x.data(), weight, shape.hidden, stride_, shape.epsilon, rows, out, normed};
    team_.share(member, count, [&](int row) { kernels_.normalize(task, row); });
}

/// Normalizes the tokens' embeddings and the states; each row has both, one after the other.
void Model::Pass::normalize_tokens_and_states(const Layer& layer, Team::Member& member) {
    const Shape& shape = model_.shape_;
    const Activations out = in_form_for(*layer.qkv, tokens_and_states_);
    Activations states = out.from(0, out.groups / 2), tokens = out;
    tokens.groups = states.groups = out.groups / 2;
    const float* norm = layer.attention_norm.empty() ? nullptr : layer.attention_norm.data();
    const Normalize tasks[2]{
        {scratch_.tokens.data(), layer.token_norm.data(), shape.hidden, stride_, shape.epsilon, nullptr, tokens},
        {scratch_.x.data(), norm, shape.hidden, stride_, shape.epsilon, nullptr, states}};
    team_.share(member, 2 * forest_.rows, [&](int unit) { kernels_.normalize(tasks[unit % 2], unit / 2); });
}

/// Returns where a member's part of a matrix begins.
const uint8_t* Model::Pass::start_of(const Matrix& weights, const Team::Member& member) const {
    const Panels panels = weights.panels();
    const int first = team_.first_unit(member.number, panels.count());
    return Panels::blocks(panels.section(first), first);
}

const uint8_t* Model::Pass::start_of_mlp(const Layer& layer, const Team::Member& member) const {
    if (!layer.experts || layer.branch_norms) return start_of(*layer.gate_up, member);
    const Router& router = layer.experts->router();
    const int first = team_.first_unit(member.number, router.vectors());
    return reinterpret_cast<const uint8_t*>(router.weights.data() + static_cast<int64_t>(first) * router.inputs * kLanes);
}

/// Returns where the weights that follow a layer begin.
const uint8_t* Model::Pass::start_after(int number, const Team::Member& member) const {
    return start_of(number + 1 < model_.num_layers() ? *model_.layers_[number + 1]->qkv : *model_.head_, member);
}

/// Plans what a member prefetches after its units of a product, where `next` are the next weights in layer `number`.
Prefetch Model::Pass::plan_prefetch(int number, int units, const uint8_t* next, const Team::Member& member) const {
    const bool is_on = forest_.rows > FetchTrial::kFewRows || model_.trial_.prefetches(number);
    return {team_.first_unit(member.number + 1, units), next, is_on};
}

void Model::Pass::multiply(int number, const Matrix& weights, const uint8_t* next, const Activations& in, int rows,
                           float* out, int64_t stride, bool add, Team::Member& member) {
    const int panels = weights.panels().count();
    const Prefetch prefetch = plan_prefetch(number, panels, next, member);
    const Product task{weights.panels(), prefetch, in_form_for(weights, in), rows, out, stride, add};
    team_.share(member, panels, [&](int panel) { kernels_.product(task, panel); });
}

}  // namespace outpace

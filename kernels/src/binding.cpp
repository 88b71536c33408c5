// The Python module: buffers in, buffers out. It reads numpy arrays by their layout only.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "binding.h"
#include "rounding.h"
#include "words.h"

namespace outpace {
namespace {

using Vector = Array<const float, 1>;
using Grid = Array<const float, 2>;

std::vector<float> to_vector(const Vector& values) { return {values.data(), values.data() + values.size()}; }

using Blocks = Array<const uint8_t, 2>;

void check_bias(const std::vector<float>& bias, std::size_t outputs) {
    if (!bias.empty() && bias.size() != outputs)
        throw std::invalid_argument("bias must have an entry for every output");
}

void check_threads(int threads) {
    if (threads < 1) throw std::invalid_argument("threads must be at least 1");
}

std::shared_ptr<Matrix> make_matrix(const Grid& weights, const std::vector<float>& bias, int threads,
                                    WeightArena* arena) {
    const auto outputs = static_cast<int>(weights.shape(0)), inputs = static_cast<int>(weights.shape(1));
    if (outputs < 1 || inputs < 1) throw std::invalid_argument("a matrix must not be empty");
    check_bias(bias, weights.shape(0));
    check_threads(threads);
    const nb::gil_scoped_release release;
    return std::make_shared<Matrix>(weights.data(), bias.empty() ? nullptr : bias.data(), outputs, inputs, threads,
                                    arena);
}

/// Makes a matrix of rows of a file's tensors (stored.h); `rounded`: converted to int8.
std::shared_ptr<Matrix> make_stored(const std::vector<std::tuple<std::string, Blocks>>& parts,
                                    const Array<const int32_t, 1>& rows, int inputs, int chunk,
                                    const std::vector<float>& bias, bool rounded, int threads, WeightArena* arena) {
    Stored stored{{}, rows.data(), static_cast<int>(rows.size()), inputs, chunk};
    for (const auto& [name, blocks] : parts)
        stored.parts.push_back({format_of(name.c_str()), blocks.data(), static_cast<int64_t>(blocks.shape(0)),
                                static_cast<int64_t>(blocks.shape(1))});
    check_bias(bias, rows.size());
    check_threads(threads);
    const nb::gil_scoped_release release;
    const float* added = bias.empty() ? nullptr : bias.data();
    if (!rounded || stored.has_floats() || stored.is_int8())
        return std::make_shared<Matrix>(stored, added, threads, arena);
    return std::make_shared<Matrix>(Matrix(stored, added, threads), threads, arena);
}

using FileMatrix = std::vector<std::tuple<std::string, Blocks>>;

std::vector<Stored> stored_of(const std::vector<FileMatrix>& matrices, int inputs, int chunk) {
    std::vector<Stored> found;
    for (const FileMatrix& parts : matrices) {
        Stored& one = found.emplace_back(Stored{{}, nullptr, 0, inputs, chunk});
        for (const auto& [name, blocks] : parts)
            one.parts.push_back({format_of(name.c_str()), blocks.data(), static_cast<int64_t>(blocks.shape(0)),
                                 static_cast<int64_t>(blocks.shape(1))});
        if (one.parts.empty()) throw std::invalid_argument("an expert has no weights");
    }
    return found;
}

std::vector<int> to_numbers(const Array<const int32_t, 1>& values) { return {values.data(), values.data() + values.size()}; }

/// Makes the experts of a layer. `router` [experts, inputs], with one more row for the gate of the shared expert if
/// there is one. `gate_up`, `down`: the parts of each expert's matrix in the file, whose rows are chosen as by
/// `Matrix.stored`; each `chunk` inputs of `down` are padded to whole groups.
std::shared_ptr<Experts> make_experts(const Grid& router, int used, std::vector<FileMatrix> gate_up,
                                      const Array<const int32_t, 1>& gate_up_rows, std::vector<FileMatrix> down,
                                      const Array<const int32_t, 1>& down_rows, int chunk,
                                      std::shared_ptr<WeightArena> arena, const std::vector<float>& bias,
                                      const std::vector<float>& correction, bool is_sigmoid, bool norms, float epsilon,
                                      float scale, bool gates_shared, bool is_rounded, bool is_mapped,
                                      const Vector& gate_up_bias, const Vector& down_bias,
                                      const std::vector<float>& scales) {
    const int inputs = static_cast<int>(router.shape(1)), experts = static_cast<int>(gate_up.size());
    if (chunk < 1) throw std::invalid_argument("chunk must be at least 1");
    if (static_cast<int>(router.shape(0)) != experts + gates_shared)
        throw std::invalid_argument("the router has " + std::to_string(router.shape(0)) + " rows for " +
                                    std::to_string(experts) + " experts");
    Router made{experts, used, inputs, is_sigmoid, norms, epsilon, scale, gates_shared};
    made.set_weights(router.data());
    made.bias = bias, made.correction = correction, made.scales = scales;
    Experts::Source source{stored_of(gate_up, inputs, 0), stored_of(down, round_up(chunk, kGroup), chunk), is_rounded, is_mapped,
                           to_numbers(gate_up_rows), to_numbers(down_rows), nullptr};
    gate_up.insert(gate_up.end(), down.begin(), down.end());
    source.owner = std::make_shared<std::vector<FileMatrix>>(std::move(gate_up));
    return std::make_shared<Experts>(std::move(made), std::move(source), gate_up_bias.is_valid() ? to_vector(gate_up_bias) : std::vector<float>{},
                                     down_bias.is_valid() ? to_vector(down_bias) : std::vector<float>{}, std::move(arena));
}

/// Rounds floats to blocks of Q4_1, row by row.
void round_rows(const Grid& weights, const Array<uint8_t, 2>& out) {
    const auto rows = static_cast<int64_t>(weights.shape(0)), columns = static_cast<int64_t>(weights.shape(1));
    if (columns % kRounded.inputs || out.shape(0) != weights.shape(0) ||
        static_cast<int64_t>(out.shape(1)) != columns / kRounded.inputs * kRounded.bytes)
        throw std::invalid_argument("out has the wrong shape");
    const nb::gil_scoped_release release;
    for (int64_t row = 0; row < rows; ++row)
        round_to_q4_1(weights.data() + row * columns, columns, out.data() + row * out.shape(1));
}

/// Converts the words of a GPTQ or (`by_output`) AWQ matrix to blocks of the format `name` (words.h).
void convert_words(const std::string& name, const Array<const uint32_t, 2>& weights, const Array<const uint32_t, 2>& zeros,
                   const Array<const uint16_t, 2>& scales, int group, bool by_output, int first_zero,
                   const Array<uint8_t, 2>& out) {
    const Format format = format_of(name.c_str());
    if (format != Format::u4_32 && format != Format::u4_64) throw std::invalid_argument("words become U4_32 or U4_64");
    const FileBlock block = file_block(format);
    const auto outputs = static_cast<int>(scales.shape(1)), inputs = static_cast<int>(weights.shape(0)) * (by_output ? 1 : 8);
    if (group < 1 || inputs < 1 || inputs % block.inputs || (group < inputs && group % block.inputs))
        throw std::invalid_argument("inputs and groups must be whole blocks");
    const auto groups = static_cast<std::size_t>((inputs - 1) / group + 1);
    if (outputs % 8 || weights.shape(1) != static_cast<std::size_t>(by_output ? outputs / 8 : outputs) ||
        zeros.shape(0) != groups || zeros.shape(1) != static_cast<std::size_t>(outputs / 8) || scales.shape(0) != groups)
        throw std::invalid_argument("the parts do not fit one another");
    if (out.shape(0) != static_cast<std::size_t>(outputs) ||
        out.shape(1) != static_cast<std::size_t>(inputs / block.inputs * block.bytes))
        throw std::invalid_argument("out has the wrong shape");
    const nb::gil_scoped_release release;
    blocks_of_words({weights.data(), zeros.data(), scales.data(), outputs, inputs, group, by_output, first_zero}, format,
                    out.data());
}

std::vector<std::string> format_names(const Matrix& matrix) {
    std::vector<std::string> names;
    for (Format format : matrix.formats()) names.emplace_back(name_of(format));
    return names;
}

/// Returns the supported formats of files with the number of inputs per block.
nb::dict file_formats() {
    nb::dict found;
    for (const FileFormat& format : kFileFormats)
        if (!is_float(format.format)) found[format.name] = format.block.inputs;
    return found;
}

/// Returns the formats of floats that are read in place.
nb::list float_formats() {
    nb::list found;
    for (const FileFormat& format : kFileFormats)
        if (is_float(format.format)) found.append(format.name);
    return found;
}

/// Reads the dequantized weights of some outputs, [outputs, inputs].
void read_rows(const Matrix& matrix, const Array<const int32_t, 1>& outputs, const Array<float, 2>& out) {
    if (out.shape(0) != outputs.shape(0) || out.shape(1) != static_cast<std::size_t>(matrix.inputs()))
        throw std::invalid_argument("out has the wrong shape");
    std::vector<float> row(static_cast<std::size_t>(matrix.groups()) * kGroup);
    for (std::size_t i = 0; i < outputs.shape(0); ++i) {
        const int output = outputs.data()[i];
        if (output < 0 || output >= matrix.outputs()) throw std::invalid_argument("an output is out of range");
        matrix.row(output, row.data());
        std::copy_n(row.data(), matrix.inputs(), out.data() + i * out.shape(1));
    }
}

/// Pads norms of the hidden state with zeros to whole groups.
std::vector<float> padded(std::vector<float> values) {
    values.resize(round_up(static_cast<int>(values.size()), kGroup), 0.0f);
    return values;
}

std::shared_ptr<Layer> make_layer(const Vector& attention_norm, const Vector& mlp_norm, std::shared_ptr<Matrix> qkv,
                                  std::shared_ptr<Matrix> output, std::shared_ptr<Matrix> gate_up,
                                  std::shared_ptr<Matrix> down, const std::vector<float>& query_norm,
                                  const std::vector<float>& key_norm, bool rotates, int rotation, int window,
                                  const std::vector<float>& attention_output_norm,
                                  const std::vector<float>& mlp_output_norm,
                                  const std::vector<float>& token_norm, std::shared_ptr<Experts> experts,
                                  const std::vector<float>& sinks, std::optional<Heads> heads, int keys_of,
                                  std::shared_ptr<BranchNorms> branch_norms, std::shared_ptr<EmbeddingBranch> embedding,
                                  float scale) {
    if (rotation < 0) throw std::invalid_argument("rotation is at least 0");
    auto layer = std::make_shared<Layer>();
    if (attention_norm.size()) layer->attention_norm = padded(to_vector(attention_norm));
    if (!token_norm.empty()) layer->token_norm = padded(token_norm);
    layer->mlp_norm = padded(to_vector(mlp_norm));
    layer->query_norm = query_norm;
    layer->key_norm = key_norm;
    layer->rotation = rotates ? rotation : -1;
    layer->window = window;
    if (!attention_output_norm.empty()) layer->attention_output_norm = padded(attention_output_norm);
    if (!mlp_output_norm.empty()) layer->mlp_output_norm = padded(mlp_output_norm);
    layer->experts = std::move(experts);
    layer->sinks = sinks;
    layer->heads = heads, layer->keys_of = keys_of, layer->scale = scale;
    layer->branch_norms = std::move(branch_norms);
    layer->embedding = std::move(embedding);
    layer->qkv = std::move(qkv);
    layer->output = std::move(output);
    layer->gate_up = std::move(gate_up);
    layer->down = std::move(down);
    return layer;
}

/// Makes a layer with a delta net or, without rates, a short convolution. `filters` [filter_length, channels].
std::shared_ptr<Layer> make_recurrent(const Vector& attention_norm, const Vector& mlp_norm,
                                      std::shared_ptr<Matrix> input, std::shared_ptr<Matrix> output,
                                      std::shared_ptr<Matrix> gate_up, std::shared_ptr<Matrix> down,
                                      const Grid& filters, std::shared_ptr<Matrix> strengths,
                                      const std::vector<float>& rates, const std::vector<float>& time_bias,
                                      const std::vector<float>& norm, std::shared_ptr<Experts> experts) {
    auto layer = std::make_shared<Layer>();
    layer->attention_norm = padded(to_vector(attention_norm));
    layer->mlp_norm = padded(to_vector(mlp_norm));
    layer->qkv = std::move(input);
    layer->output = std::move(output);
    layer->gate_up = std::move(gate_up);
    layer->down = std::move(down);
    layer->strengths = std::move(strengths);
    layer->experts = std::move(experts);
    layer->recurrent = std::make_shared<RecurrentWeights>(
        RecurrentWeights{{filters.data(), filters.data() + filters.size()}, rates, time_bias, norm});
    return layer;
}

/// Makes embeddings for all layers. `table` [tokens, bytes]: rows of `columns` numbers in a format of a file.
std::shared_ptr<TokenEmbeddings> make_embeddings(const std::string& name, Blocks table, int columns,
                                                 std::shared_ptr<Matrix> projection, const std::vector<float>& norm) {
    const Format format = format_of(name.c_str());
    const FileBlock block = file_block(format);
    const auto rows = static_cast<int64_t>(table.shape(0)), bytes = static_cast<int64_t>(table.shape(1));
    if (columns < 1 || columns % block.inputs || bytes != static_cast<int64_t>(columns) / block.inputs * block.bytes ||
        !projection || projection->outputs() != columns)
        throw std::invalid_argument("the table has the wrong shape");
    const StoredRows stored{format, table.data(), rows, bytes};
    return std::make_shared<TokenEmbeddings>(
        TokenEmbeddings{stored, std::make_shared<Blocks>(std::move(table)), std::move(projection), norm});
}

constexpr const char* kKvFormats[] = {"float32", "float16", "int8"};  // in the order of KvFormat

nb::tuple kv_formats() {
    return nb::make_tuple(kKvFormats[0], kKvFormats[1], kKvFormats[2]);
}

/// `scale` of the attention scores; 0: 1 / sqrt(depth).
Heads make_heads(int queries, int keys, int depth, const std::string& kv_dtype, float epsilon, float scale,
                 bool is_gated, float cap, int projected, bool norms_values) {
    if (depth < 1 || keys < 1) throw std::invalid_argument("heads must not be empty");
    if (projected < 0 || projected > 2) throw std::invalid_argument("projected is out of range");
    const auto found = std::find(std::begin(kKvFormats), std::end(kKvFormats), kv_dtype);
    if (found == std::end(kKvFormats)) throw std::invalid_argument("the kv_dtype " + kv_dtype + " is not known");
    if (scale == 0.0f) scale = 1.0f / __builtin_sqrtf(static_cast<float>(depth));
    return {queries, keys, depth, static_cast<KvFormat>(found - kKvFormats), scale, epsilon, is_gated, cap, projected, norms_values};
}

void init_model(Model* place, const Heads& heads, int hidden, int middle, float epsilon,
                const std::vector<std::shared_ptr<Layer>>& layers, std::shared_ptr<Matrix> embedding,
                const Vector& norm, std::shared_ptr<Matrix> head, const std::string& instruction_set, int threads,
                int rotations, float embedding_scale, bool is_gelu, const Recurrence& recurrence, float gate_limit,
                float logit_cap, std::shared_ptr<TokenEmbeddings> embeddings) {
    const Kernels* kernels = find_kernels(instruction_set);
    if (!kernels) throw std::invalid_argument("this machine has no instruction set '" + instruction_set + "'");
    if (threads < 1) throw std::invalid_argument("threads must be at least 1");
    new (place) Model({hidden, middle, epsilon, heads, rotations, embedding_scale,
                       gate_limit > 0.0f ? Gating::clamped : is_gelu ? Gating::gelu : Gating::silu, recurrence, gate_limit, logit_cap},
                      {layers.begin(), layers.end()}, std::move(embedding), to_vector(norm), std::move(head), kernels,
                      threads, std::move(embeddings));
}

void check_slots(const Store& store, const std::vector<int>& source, int start) {
    for (int slot : source)
        if (slot < 0 || slot >= store.slots()) throw std::invalid_argument("a slot is out of range");
    if (start < 0 || start + static_cast<int>(source.size()) > store.slots())
        throw std::invalid_argument("a slot is out of range");
}

/// Creates a store for at most `capacity` slots that holds `slots` slots; negative: all of them.
void init_store(Store* place, const std::vector<Heads>& heads, int capacity, int slots, const Recurrence& recurrence) {
    if (heads.empty() || capacity < 0 || slots > capacity) throw std::invalid_argument("capacity is out of range");
    new (place) Store(heads, capacity, slots < 0 ? capacity : slots, recurrence);
}

/// Makes the sizes of recurrent layers. Throws std::invalid_argument for sizes that contradict one another.
Recurrence make_recurrence(int layers, int filter_length, int channels, int key_heads, int value_heads, int key_depth,
                           int value_depth, bool is_tiled) {
    if (layers < 0 || filter_length < 1 || channels < 1) throw std::invalid_argument("recurrent layers must not be empty");
    if (key_heads < 0 || key_depth < 0 || value_depth < 0 || (value_heads && (key_heads < 1 || value_heads % key_heads)))
        throw std::invalid_argument("value_heads is no multiple of key_heads");
    return {layers, filter_length, channels, key_heads, value_heads, key_depth, value_depth, is_tiled};
}

States& states_of(const Store& store) {
    if (!store.states()) throw std::invalid_argument("the store has no recurrent states");
    return *store.states();
}

/// Commits pending nodes of the recurrent states, as of the slots.
void keep(Store& store, const std::vector<int>& path, const std::vector<int>& live) {
    states_of(store).keep(path, live);
}

void save(const Store& store, const Array<float, 1>& out) {
    if (out.size() != states_of(store).size()) throw std::invalid_argument("out has the wrong shape");
    states_of(store).save(out.data());
}

void load(Store& store, const Array<const float, 1>& saved) {
    if (saved.is_valid() && saved.size() != states_of(store).size())
        throw std::invalid_argument("the saved state is of another model");
    states_of(store).load(saved.is_valid() ? saved.data() : nullptr);
}

std::size_t store_bytes(const std::vector<Heads>& heads, int slots, const Recurrence& recurrence, int places) {
    return Store::bytes_of(heads, slots) + States::bytes_of(recurrence, places);
}

void resize(Store& store, int slots) {
    if (slots < 0 || slots > store.capacity()) throw std::invalid_argument("slots is out of range");
    store.resize(slots);
}

void check_count(const Store& store, int count) {
    if (count < 0 || count > store.slots()) throw std::invalid_argument("count is out of range");
}

void copy(Store& store, const Store& other, int count) {
    check_count(store, count);
    check_count(other, count);
    if (!store.has_slots_of(other)) throw std::invalid_argument("the other store is of another model");
    store.copy(other, count);
}

void read(const Store& store, int layer, int count, const Array<float, 4>& out) {
    check_count(store, count);
    if (layer < 0 || layer >= store.layers()) throw std::invalid_argument("layer is out of range");
    const Heads& heads = store.heads()[layer];
    if (out.size() != static_cast<std::size_t>(2) * heads.keys * count * heads.depth)
        throw std::invalid_argument("out has the wrong shape");
    store.read(layer, count, out.data());
}

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const Kernels* kernels : available_kernels()) names.emplace_back(kernels->name);
    return names;
}

/// Returns the operations (a multiplication or an addition) on bytes per second that `threads` threads reach in
/// registers for about `seconds`.
double multiply_rate(const std::string& instruction_set, int threads, double seconds) {
    using Clock = std::chrono::steady_clock;
    const Kernels* kernels = find_kernels(instruction_set);
    if (!kernels) throw std::invalid_argument("this machine cannot run instruction set " + instruction_set);
    if (threads < 1) throw std::invalid_argument("threads must be at least 1");
    const auto measure = [&](double* rate) {
        float sums[kMeasuredSums];
        int64_t products = 0;
        const auto start = Clock::now();
        std::chrono::duration<double> taken{};
        do {
            products += kernels->multiply_only(10000, sums);
            taken = Clock::now() - start;
        } while (taken.count() < seconds);
        *rate = 2.0 * products / taken.count();
    };
    std::vector<double> rates(threads);
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(measure, &rates[i]);
    measure(&rates[0]);
    for (std::thread& other : others) other.join();
    return std::accumulate(rates.begin(), rates.end(), 0.0);
}

}  // namespace

NB_MODULE(_native, m) {
    // Objects alive at interpreter exit are not leaks: a daemon thread or a cache may hold a model. Models hold layers,
    // layers hold matrices, and these hold nothing else, so there are no cycles to report.
    nb::set_leak_warnings(false);
    m.attr("ARITHMETIC") = kArithmetic;
    m.attr("GROUP") = kGroup;
    m.attr("LANES") = kLanes;
    m.attr("MAX_DEPTH") = kDepthMax;
    m.attr("MAX_USED_EXPERTS") = kUsedMax;
    m.attr("FORMATS") = file_formats();
    m.attr("FLOATS") = float_formats();
    m.attr("KV_DTYPES") = kv_formats();
    m.def("instruction_sets", &instruction_sets);
    m.def("multiply_rate", &multiply_rate, "instruction_set"_a = "", "threads"_a = 1, "seconds"_a = 0.2,
          nb::call_guard<nb::gil_scoped_release>());
    m.def("round_to_q4_1", &round_rows, "weights"_a, "out"_a);
    m.def("blocks_of_words", &convert_words, "name"_a, "weights"_a, "zeros"_a, "scales"_a, "group"_a, "by_output"_a,
          "first_zero"_a, "out"_a);

    bind_rank(m);
    bind_tree(m);

    nb::class_<WeightArena>(m, "WeightArena").def(nb::init<>());

    nb::class_<Matrix>(m, "Matrix")
        .def(nb::new_(&make_matrix), "weights"_a, "bias"_a = std::vector<float>{}, "threads"_a = 1,
             "arena"_a = nb::none())
        .def_static("stored", &make_stored, "parts"_a, "rows"_a, "inputs"_a, "chunk"_a = 0,
                    "bias"_a = std::vector<float>{}, "rounded"_a = false, "threads"_a = 1, "arena"_a = nb::none())
        .def_prop_ro("formats", &format_names)
        .def_prop_ro("outputs", &Matrix::outputs)
        .def_prop_ro("inputs", &Matrix::inputs)
        .def_prop_ro("bytes", &Matrix::bytes)
        .def("read", &read_rows, "outputs"_a, "out"_a);

    nb::class_<BranchNorms>(m, "BranchNorms")
        .def(nb::new_([](const std::vector<float>& router, const std::vector<float>& mlp_output,
                         const std::vector<float>& experts, const std::vector<float>& experts_output) {
            return std::make_shared<BranchNorms>(
                BranchNorms{padded(router), padded(mlp_output), padded(experts), padded(experts_output)});
        }), "router"_a, "mlp_output"_a, "experts"_a, "experts_output"_a);

    nb::class_<EmbeddingBranch>(m, "EmbeddingBranch")
        .def(nb::new_([](std::shared_ptr<Matrix> gate, std::shared_ptr<Matrix> output, const std::vector<float>& norm) {
            return std::make_shared<EmbeddingBranch>(EmbeddingBranch{std::move(gate), std::move(output), padded(norm)});
        }), "gate"_a, "output"_a, "norm"_a);

    nb::class_<TokenEmbeddings>(m, "TokenEmbeddings")
        .def(nb::new_(&make_embeddings), "name"_a, "table"_a, "columns"_a, "projection"_a, "norm"_a)
        .def_prop_ro("bytes", [](const TokenEmbeddings& embeddings) { return embeddings.projection->bytes(); });

    nb::class_<Layer>(m, "Layer")
        .def(nb::new_(&make_layer), "attention_norm"_a, "mlp_norm"_a, "qkv"_a, "output"_a, "gate_up"_a.none(), "down"_a.none(),
             "query_norm"_a = std::vector<float>{}, "key_norm"_a = std::vector<float>{}, "rotates"_a = true,
             "rotation"_a = 0, "window"_a = 0, "attention_output_norm"_a = std::vector<float>{},
             "mlp_output_norm"_a = std::vector<float>{}, "token_norm"_a = std::vector<float>{}, "experts"_a = nb::none(),
             "sinks"_a = std::vector<float>{}, "heads"_a = nb::none(), "keys_of"_a = -1, "branch_norms"_a = nb::none(),
             "embedding"_a = nb::none(), "scale"_a = 1.0f)
        .def_static("recurrent", &make_recurrent, "attention_norm"_a, "mlp_norm"_a, "input"_a, "output"_a, "gate_up"_a.none(),
                    "down"_a.none(), "filters"_a, "strengths"_a = nb::none(), "rates"_a = std::vector<float>{},
                    "time_bias"_a = std::vector<float>{}, "norm"_a = std::vector<float>{}, "experts"_a = nb::none())
        .def_rw("window", &Layer::window)
        .def_rw("is_causal", &Layer::is_causal)
        .def("to_kv_only", [](const Layer& layer) {
            auto other = std::make_shared<Layer>(layer);
            other->attention_norm.clear();
            other->output = other->gate_up = other->down = nullptr;
            other->experts = nullptr;
            return other;
        })
        .def_prop_ro("bytes", [](const Layer& layer) {
            std::size_t total = layer.qkv->bytes() + layer.output->bytes();
            for (const auto& matrix : {layer.gate_up, layer.down, layer.strengths}) total += matrix ? matrix->bytes() : 0;
            if (layer.embedding) total += layer.embedding->gate->bytes() + layer.embedding->output->bytes();
            return total + (layer.experts ? layer.experts->row_bytes() : 0);
        });

    nb::class_<Experts>(m, "Experts")
        .def(nb::new_(&make_experts), "router"_a, "used"_a, "gate_up"_a, "gate_up_rows"_a, "down"_a, "down_rows"_a,
             "chunk"_a, "arena"_a, "bias"_a = std::vector<float>{}, "correction"_a = std::vector<float>{},
             "sigmoid"_a = false, "norms"_a = false, "epsilon"_a = 0.0f, "scale"_a = 1.0f, "gates_shared"_a = false,
             "rounded"_a = false, "mapped"_a = false, "gate_up_bias"_a.none() = nb::none(), "down_bias"_a.none() = nb::none(),
             "scales"_a = std::vector<float>{})
        .def_prop_ro("count", &Experts::count)
        .def_prop_ro("expert_bytes", &Experts::expert_bytes)
        .def_prop_ro("num_packed", &Experts::num_packed)
        .def_prop_ro("held", &Experts::held)
        .def("hold", &Experts::hold, "count"_a)
        .def("pack", [](Experts& experts) {
            {
                const nb::gil_scoped_release release;
                experts.pack_all();
            }
            experts.release_source();
        });

    nb::class_<Heads>(m, "Heads")
        .def(nb::new_(&make_heads), "queries"_a, "keys"_a, "depth"_a, "kv_dtype"_a, "epsilon"_a, "scale"_a = 0.0f,
             "gated"_a = false, "cap"_a = 0.0f, "projected"_a = 2, "norms_values"_a = false)
        .def_prop_ro("padded_depth", [](const Heads& heads) { return heads.head_groups() * kGroup; });

    nb::class_<Recurrence>(m, "Recurrence")
        .def(nb::new_(&make_recurrence), "layers"_a, "filter_length"_a, "channels"_a, "key_heads"_a = 0,
             "value_heads"_a = 0, "key_depth"_a = 0, "value_depth"_a = 0, "tiled"_a = false)
        .def_prop_ro("head_groups", &Recurrence::head_groups);

    nb::class_<Store>(m, "Store")
        .def("__init__", &init_store, "heads"_a, "capacity"_a, "slots"_a = -1,
             "recurrence"_a = Recurrence{})
        .def_prop_ro("slots", &Store::slots)
        .def_prop_ro("bytes", &Store::bytes)
        .def_static("bytes_of", &store_bytes, "heads"_a, "slots"_a, "recurrence"_a = Recurrence{},
                    "places"_a = 0)
        .def("keep", &keep, "path"_a, "live"_a)
        .def("trim_states", [](Store& store) { states_of(store).free_memory(0); })
        .def_prop_ro("state_size", [](const Store& store) { return states_of(store).size(); })
        .def("save_state", &save, "out"_a)
        .def("load_state", &load, "saved"_a.none())
        .def("resize", &resize, "slots"_a)
        .def("move", [](Store& store, const std::vector<int>& source, int start) {
            check_slots(store, source, start);
            store.move(source, start);
        }, "source"_a, "start"_a)
        .def("copy", &copy, "other"_a, "count"_a)
        .def("read", &read, "layer"_a, "count"_a, "out"_a);

    nb::class_<Model> model(m, "Model");
    model
        .def("__init__", &init_model, "heads"_a, "hidden"_a, "middle"_a, "epsilon"_a, "layers"_a, "embedding"_a,
             "norm"_a, "head"_a, "instruction_set"_a, "threads"_a, "rotations"_a = 1, "embedding_scale"_a = 1.0f,
             "gelu"_a = false, "recurrence"_a = Recurrence{}, "gate_limit"_a = 0.0f, "logit_cap"_a = 0.0f,
             "embeddings"_a = nb::none())
        .def_prop_ro("outputs", &Model::outputs)
        .def_prop_ro("threads", &Model::threads)
        .def_prop_ro("mean_experts", &Model::mean_experts)
        .def_prop_ro("instruction_set", [](const Model& model) { return std::string(model.kernels().name); });
    bind_forward(model);
}

}  // namespace outpace

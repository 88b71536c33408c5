// A file's weights: every instruction set gives the same bits for any number of rows, a row does not depend on its
// neighbours, products are sums of the values that `row` reads, and wrong sizes throw.
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

#include "check.h"
#include "kernels.h"
#include "matrix.h"
#include "pass.h"
#include "rounding.h"

namespace outpace {
namespace {

constexpr Format kFormats[] = {Format::q4_0, Format::q4_1, Format::q5_0, Format::q5_1, Format::q8_0,
                               Format::iq4_nl, Format::q4_k, Format::q5_k, Format::q6_k};
constexpr Format kPowers[] = {Format::mxfp4};
constexpr Format kOurs[] = {Format::u4_32, Format::u4_64};
constexpr int kRows = 13, kOutputs = 75;

using Random = std::mt19937;

/// Random bytes, except for block scales between 1/128 and 1/4.
std::vector<uint8_t> file_rows(Random& random, Format format, int rows, int inputs) {
    const FileBlock block = file_block(format);
    const bool has_second = format != Format::q4_0 && format != Format::q5_0 && format != Format::q8_0 &&
                            format != Format::iq4_nl && format != Format::q6_k && format != Format::mxfp4;
    std::vector<uint8_t> bytes(static_cast<std::size_t>(rows) * inputs / block.inputs * block.bytes);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random() >> 8);
    for (std::size_t start = 0; start < bytes.size(); start += block.bytes) {
        if (format == Format::mxfp4) {
            bytes[start] = static_cast<uint8_t>(120 + bytes[start] % 6);
            continue;
        }
        const int scale = format == Format::q6_k ? 208 : 0;
        bytes[start + scale + 1] = static_cast<uint8_t>(0x20 + bytes[start + scale + 1] % 0x14);
        if (has_second) bytes[start + 3] = static_cast<uint8_t>(0x20 + bytes[start + 3] % 0x14 + bytes[start + 2] / 128 * 128);
    }
    return bytes;
}

struct Source {
    Format format;
    std::vector<uint8_t> bytes;
    std::vector<int> rows;
    Stored stored;

    Source(Random& random, Format asked, int outputs, int inputs, int chunk = 0) : format(asked), rows(outputs) {
        for (int i = 0; i < outputs; ++i) rows[i] = i % 7 == 5 ? -1 : (i * 11) % outputs;
        stored = {{}, rows.data(), outputs, inputs, chunk};
        bytes = file_rows(random, format, outputs, stored.file_inputs());
        stored.parts.push_back({format, bytes.data(), outputs, static_cast<int64_t>(bytes.size()) / outputs});
    }
};

std::vector<float> floats(Random& random, std::size_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(random() >> 8) * 0x1p-22f - 2.0f;
    return values;
}

/// x [rows, inputs] in int8, as a norm with weights of one leaves it.
struct Inputs {
    ActivationBuffer buffer;
    Activations view;

    Inputs(const Kernels& kernels, const Matrix& matrix, const std::vector<float>& x, int rows, int inputs)
        : view(buffer.view(rows, round_up(inputs, kGroup) / kGroup)) {
        view.by_quarters = matrix.takes_quarters();
        const int stride = view.groups * kGroup;
        std::vector<float> padded(static_cast<std::size_t>(rows) * stride), ones(stride, 1.0f);
        for (int row = 0; row < rows; ++row)
            std::copy_n(x.data() + static_cast<std::size_t>(row) * inputs, inputs, padded.data() + static_cast<std::size_t>(row) * stride);
        const Normalize task{padded.data(), ones.data(), inputs, stride, 1e-5f, nullptr, view};
        for (int row = 0; row < rows; ++row) kernels.normalize(task, row);
    }
};

std::vector<float> multiply(const Kernels& kernels, const Matrix& matrix, const Inputs& in, int rows) {
    std::vector<float> out(static_cast<std::size_t>(rows) * matrix.outputs());
    const Product task{matrix.panels(), {}, in.view, rows, out.data(), matrix.outputs(), false};
    for (int panel = 0; panel < task.weights.count(); ++panel) kernels.product(task, panel);
    return out;
}

bool same(const float* a, const float* b, std::size_t count) { return !std::memcmp(a, b, count * sizeof(float)); }

/// Compares with sums in double of `row` and the dequantized activations.
void check_values(const Matrix& matrix, const Inputs& in, const std::vector<float>& bias, const std::vector<float>& out) {
    std::vector<float> weights(static_cast<std::size_t>(matrix.groups()) * kGroup);
    const int shared = kGroup / (matrix.takes_quarters() ? kQuarters : kHalves);
    for (int output = 0; output < matrix.outputs(); ++output) {
        matrix.row(output, weights.data());
        for (int row = 0; row < kRows; ++row) {
            double total = bias[output], size = 0;
            for (int i = 0; i < matrix.groups() * kGroup; ++i) {
                const Activations at = in.view.from(row, i / kGroup);
                const double term = static_cast<double>(weights[i]) * at.values[i % kGroup] * at.facts->scales()[i % kGroup / shared];
                total += term;
                size += std::fabs(term);
            }
            const float got = out[static_cast<std::size_t>(row) * matrix.outputs() + output];
            check(std::fabs(got - total) <= 1e-5 * (size + 1), name_of(matrix.formats()[0]));
        }
    }
}

uint64_t test_products(const Matrix& matrix, const std::vector<float>& bias, const std::vector<float>& x, int inputs) {
    std::vector<float> expected;
    for (const Kernels* kernels : available_kernels()) {
        const Inputs in(*kernels, matrix, x, kRows, inputs);
        const std::vector<float> all = multiply(*kernels, matrix, in, kRows);
        if (expected.empty()) check_values(matrix, in, bias, expected = all);
        check(same(all.data(), expected.data(), all.size()), (std::string(kernels->name) + " and a file's weights").c_str());
        for (int rows = 1; rows < kRows; ++rows) {
            const std::vector<float> some = multiply(*kernels, matrix, in, rows);
            check(same(some.data(), expected.data(), some.size()), "a row does not see its neighbours");
        }
    }
    uint64_t hash = 0xcbf29ce484222325u;
    const auto* bytes = reinterpret_cast<const unsigned char*>(expected.data());
    for (std::size_t i = 0; i < expected.size() * sizeof(float); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

/// The largest numbers of a format times the largest activations, all of one sign: sums in few bits must hold them.
void test_extremes(Format format) {
    Random random(12);
    const int inputs = 512;
    std::vector<float> x(static_cast<std::size_t>(kRows) * inputs), none(kOutputs);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = i / inputs % 2 ? -1.0f : 1.0f;
    for (uint8_t byte : {0xff, 0x80, 0x00}) {
        Source source(random, format, kOutputs, inputs);
        const FileBlock block = file_block(format);
        const std::size_t scales = format == Format::q6_k ? 0 : format == Format::mxfp4 ? 1 : 4, numbers = format == Format::q6_k ? 192 : block.bytes;
        for (std::size_t start = 0; start < source.bytes.size(); start += block.bytes)
            for (std::size_t i = scales; i < numbers; ++i) source.bytes[start + i] = byte;
        test_products(Matrix(source.stored, nullptr), none, x, inputs);
    }
}

/// Chunks of 32 in groups of 64: the other half is zeros, and inputs there change nothing.
void test_padding(Random& random) {
    Random apart(14);  // a separate generator keeps the bits of later tests
    for (Format format : {Format::q4_1, Format::q8_0, Format::iq4_nl, Format::u4_32}) {
        const Source source(format == Format::u4_32 ? apart : random, format, 32, 256, 32);
        const Matrix matrix(source.stored, nullptr);
        std::vector<float> row(256);
        for (int output = 0; output < 32; ++output) {
            matrix.row(output, row.data());
            for (int i = 0; i < 256; ++i) check(i % 64 < 32 || row[i] == 0.0f, "padding is zeros");
        }
    }
}

/// Two tensors of two formats in one matrix, and the same with others in a shared arena.
uint64_t test_sections(Random& random) {
    const Source first(random, Format::q4_k, 64, 512), second(random, Format::q6_k, kOutputs, 512);
    std::vector<int> rows(64 + kOutputs);
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int>(i);
    Stored both = first.stored;
    both.parts.push_back(second.stored.parts[0]);
    both.rows = rows.data();
    both.outputs = static_cast<int>(rows.size());
    const Matrix matrix(both, nullptr, 3);
    check(matrix.formats().size() == 2, "a section for every format");
    const std::vector<float> x = floats(random, kRows * 512), none(rows.size());
    const uint64_t bits = test_products(matrix, none, x, 512);
    auto arena = std::make_unique<WeightArena>();
    const Matrix before(first.stored, nullptr, 1, arena.get()), together(both, nullptr, 1, arena.get());
    const Matrix after(matrix, 1, arena.get());
    const uint8_t* start = together.panels().sections[0].blocks;
    check(start == before.panels().sections[0].blocks + before.panel_bytes(), "matrices lie one behind the other");
    arena.reset();
    check(test_products(together, none, x, 512) == bits, "a matrix in an arena gives the same bits");
    return bits;
}

/// Blocks grow: what follows a large matrix and many small ones is in few of them.
void test_arena() {
    constexpr std::size_t kPiece = std::size_t{1} << 22;
    WeightArena arena;
    std::vector<WeightArena::Allocation> places;
    std::size_t blocks = 0;
    for (int i = 0; i < 250; ++i) {  // 1 GB of addresses, untouched
        places.push_back(arena.allocate(i ? kPiece - i : kPiece * 20));
        blocks += !i || places[i].block != places[i - 1].block;
        const auto* home = places[i].block.get();
        check(places[i].start >= home->data() && places[i].start + kPiece <= home->data() + home->size(), "a place in its block");
        const bool is_next = i && places[i].block == places[i - 1].block;
        check(!is_next || places[i].start >= places[i - 1].start + kPiece - i, "places do not overlap");
    }
    check(blocks <= 9, "blocks grow");
}

template <class E, class F>
void check_throws(F f, const char* what) {
    try {
        f();
    } catch (const E&) {
        return;
    }
    check(false, what);
}

void test_refusals(Random& random) {
    Source source(random, Format::q4_k, 32, 256);
    source.stored.inputs = 512;
    check_throws<std::invalid_argument>([&] { Matrix(source.stored, nullptr); }, "rows of another size");
    source.stored.inputs = 256;
    source.rows[3] = 32;
    check_throws<std::invalid_argument>([&] { Matrix(source.stored, nullptr); }, "a row out of range");
    source.rows[3] = 0;
    Stored mixed = source.stored;
    const Source other(random, Format::q5_k, 32, 256);
    mixed.parts.push_back(other.stored.parts[0]);
    source.rows[8] = 40;
    check_throws<std::invalid_argument>([&] { Matrix(mixed, nullptr); }, "two formats in a panel");
    source.rows[8] = 0;
    Source cut(random, Format::u4_64, 32, 256, 64);
    cut.stored.chunk = 32, cut.stored.inputs = 512;
    check_throws<std::invalid_argument>([&] { Matrix(cut.stored, nullptr); }, "a block that a chunk cuts");
    for (std::size_t at : {1u, 3u}) {
        Source damaged(random, Format::q4_k, 32, 256);
        damaged.bytes[at] = 0x7c;
        check_throws<std::domain_error>([&] { Matrix(damaged.stored, nullptr); }, "a scale that is not finite");
    }
    check_throws<std::invalid_argument>([] { format_of("Q9_9"); }, "a format that is not known");
}

/// Returns the squared error of weights in blocks of Q4_1, and the largest error.
std::pair<double, double> loss_of(const std::vector<float>& weights, const std::vector<uint8_t>& blocks) {
    const int zero = 0;
    Stored stored{{}, &zero, 1, static_cast<int>(weights.size()), 0};
    stored.parts.push_back({Format::q4_1, blocks.data(), 1, static_cast<int64_t>(blocks.size())});
    std::vector<float> row(weights.size());
    Matrix(stored, nullptr).row(0, row.data());
    double squares = 0, largest = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
        const double loss = std::fabs(row[i] - weights[i]);
        squares += loss * loss, largest = loss > largest ? loss : largest;
    }
    return {squares, largest};
}

std::vector<uint8_t> in_four_bits(const std::vector<float>& weights) {
    std::vector<uint8_t> blocks(weights.size() / kRounded.inputs * kRounded.bytes);
    round_to_q4_1(weights.data(), static_cast<int64_t>(weights.size()), blocks.data());
    return blocks;
}

/// Whole ranges keep every weight within half a step; narrower ones gain more than they clamp.
void test_rounding() {
    Random random(15);
    std::vector<float> levels(128), even(4096), bells(4096);
    for (std::size_t i = 0; i < levels.size(); ++i) levels[i] = i % 32 < 16 ? i % 16 * 0.5f - 2.0f : 3.0f;
    check(loss_of(levels, in_four_bits(levels)).first < 1e-6 * levels.size(), "levels of a block are themselves");
    for (float& weight : even) weight = static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f;
    check(loss_of(even, in_four_bits(even)).first < 0.0016 * even.size(), "evenly spread weights lose little");  // 1/12 step^2
    for (float& weight : bells) {
        weight = -6.0f;
        for (int i = 0; i < 12; ++i) weight += static_cast<float>(random() >> 8) * 0x1p-24f;
    }
    check(loss_of(bells, in_four_bits(bells)).first < 0.0058 * bells.size(), "rare large weights are cut off");
    const std::vector<float> zeros(64);
    check(loss_of(zeros, in_four_bits(zeros)).second == 0, "zeros are zeros");
}

template <std::size_t N>
uint64_t test_formats(Random& random, const Format (&formats)[N]) {
    uint64_t bits = 0;
    for (Format format : formats) {
        const int inputs = file_block(format).inputs == 32 ? 416 : 768;  // 6.5 groups, 12
        const Source source(random, format, kOutputs, inputs);
        const std::vector<float> bias = floats(random, kOutputs), x = floats(random, static_cast<std::size_t>(kRows) * inputs);
        check(format_of(name_of(format)) == format, "a format has one name");
        bits ^= test_products(Matrix(source.stored, bias.data()), bias, x, inputs);
    }
    for (Format format : formats) test_extremes(format);
    return bits;
}

}  // namespace

uint64_t test_stored() {
    Random random(11);
    const uint64_t bits = test_formats(random, kFormats);
    test_padding(random);
    return bits ^ test_sections(random);
}

uint64_t test_stored_powers() {
    Random random(19);
    return test_formats(random, kPowers);
}

uint64_t test_stored_ours() {
    Random random(13);
    const uint64_t bits = test_formats(random, kOurs);
    test_refusals(random);
    test_arena();
    test_rounding();
    return bits;
}

}  // namespace outpace

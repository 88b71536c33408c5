// Other sources of panels than a file's blocks: floats that are rounded in place, and words of GPTQ and AWQ.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "file_blocks.h"
#include "half.h"
#include "matrix.h"
#include "words.h"

namespace outpace {
namespace {

using Random = std::mt19937;

/// Returns numbers that all three float formats represent exactly.
std::vector<float> numbers(Random& random, std::size_t count) {
    std::vector<float> found(count);
    for (float& number : found) number = static_cast<float>(static_cast<int>(random() % 255) - 127) * 0x1p-6f;
    return found;
}

std::vector<uint8_t> bytes_of(Format format, const std::vector<float>& values) {
    const int size = file_block(format).bytes;
    std::vector<uint8_t> bytes(values.size() * size);
    for (std::size_t i = 0; i < values.size(); ++i) {
        const Half half = float_to_half(values[i]);
        const uint8_t* whole = reinterpret_cast<const uint8_t*>(&values[i]);
        const void* from = format == Format::f32 ? whole : format == Format::f16 ? static_cast<const void*>(&half) : whole + 2;
        std::memcpy(&bytes[i * size], from, size);
    }
    return bytes;
}

template <class F>
bool throws(F make) {
    try {
        make();
    } catch (const std::exception&) {
        return true;
    }
    return false;
}

/// Floats of two parts with permuted and missing rows, in padded chunks, equal the same floats passed as one array.
void test_floats(Format format, int chunk, int chunks) {
    Random random(7);
    constexpr int kOutputs = 70, kFirst = 30;
    const int columns = chunk * chunks, padded = round_up(chunk, kGroup), inputs = padded * chunks;
    const std::vector<float> values = numbers(random, static_cast<std::size_t>(kOutputs) * columns);
    std::vector<uint8_t> bytes = bytes_of(format, values);
    std::vector<int> rows(kOutputs);
    for (int i = 0; i < kOutputs; ++i) rows[i] = i % 9 == 4 ? -1 : i * 11 % kOutputs;
    const int64_t row_bytes = static_cast<int64_t>(columns) * file_block(format).bytes;
    Stored stored{{}, rows.data(), kOutputs, inputs, chunk};
    stored.parts = {{format, bytes.data(), kFirst, row_bytes},
                    {format, bytes.data() + kFirst * row_bytes, kOutputs - kFirst, row_bytes}};
    std::vector<float> whole(static_cast<std::size_t>(kOutputs) * inputs);
    for (int i = 0; i < kOutputs; ++i)
        for (int j = 0; rows[i] >= 0 && j < columns; ++j)
            whole[static_cast<std::size_t>(i) * inputs + j / chunk * padded + j % chunk] = values[rows[i] * columns + j];
    const Matrix found(stored, nullptr, 2), expected(whole.data(), nullptr, kOutputs, inputs);
    std::vector<float> one(inputs), other(inputs);
    for (int i = 0; i < kOutputs; ++i) {
        found.row(i, one.data()), expected.row(i, other.data());
        check(one == other, "floats of a file are rounded as floats in memory are");
    }
    stored.parts[1].format = format == Format::f16 ? Format::bf16 : Format::f16;
    const auto make = [&] { Matrix(stored, nullptr, 2); };
    check(throws(make), "floats of two formats");
    stored.parts[1].format = format;
    // the exponent of each format's last number is full
    bytes[bytes.size() - 1] = 0x7f, bytes[bytes.size() - 2] |= 0x80;
    if (format == Format::f16) bytes[bytes.size() - 1] = 0x7c;
    check(throws(make), "a float that is not finite");
}

/// int8 loses at most half a step, and a step is at most a 127th of the largest of 32, rounded up to half precision.
void test_int8() {
    Random random(10);
    constexpr int kOutputs = 40, kInputs = 160;
    std::vector<float> values(static_cast<std::size_t>(kOutputs) * kInputs), row(round_up(kInputs, kGroup));
    for (std::size_t i = 0; i < values.size(); ++i) {
        const float size = std::ldexp(1.0f, static_cast<int>(i / kInputs) - 30);  // from 2^-30 to 2^9
        values[i] = (static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f) * size;
    }
    const Matrix matrix(values.data(), nullptr, kOutputs, kInputs);
    check(!matrix.takes_quarters() && matrix.formats()[0] == Format::q8_0, "int8 is Q8_0");
    for (int output = 0; output < kOutputs; ++output) {
        matrix.row(output, row.data());
        for (int first = 0; first < kInputs; first += kHalfGroup) {
            const float* from = values.data() + static_cast<std::size_t>(output) * kInputs + first;
            float top = 0;
            for (int i = 0; i < kHalfGroup; ++i) top = std::max(top, std::fabs(from[i]));
            const double step = std::max(top / 127.0 * 1.001, top / 127.0 + 0x1p-24);
            for (int i = 0; i < kHalfGroup; ++i)
                check(std::fabs(row[first + i] - from[i]) <= 0.5001 * step, "int8 loses half a step at most");
        }
    }
    for (float wrong : {std::nanf(""), INFINITY, 8.4e6f}) {
        std::vector<float> damaged = values;
        damaged[kInputs + 37] = wrong;
        check(throws([&] { Matrix(damaged.data(), nullptr, kOutputs, kInputs, 2); }), "a weight that int8 does not hold");
    }
    values[kInputs + 37] = -8.3e6f;
    Matrix(values.data(), nullptr, kOutputs, kInputs).row(1, row.data());
    check(std::fabs(row[37] + 8.3e6f) < 4e4f, "a large weight");
}

/// Compares an output, computed from the words of its inputs, with the blocks: scale * (q - zero).
void test_words(bool by_output, Format format, int group, int inputs) {
    Random random(9);
    constexpr int kOutputs = 136, kOrder[] = {0, 2, 4, 6, 1, 3, 5, 7};
    const int groups = (inputs - 1) / group + 1, first_zero = by_output ? 0 : 1;
    std::vector<int> q(static_cast<std::size_t>(kOutputs) * inputs), zeros(static_cast<std::size_t>(kOutputs) * groups);
    for (int& number : q) number = static_cast<int>(random() % 16);
    for (int& number : zeros) number = static_cast<int>(random() % 15);
    std::vector<uint16_t> scales(zeros.size());
    for (uint16_t& scale : scales) scale = static_cast<uint16_t>(0x1c00 + random() % 0x0800);
    std::vector<uint32_t> words(q.size() / 8), zero_words(zeros.size() / 8);
    const auto put = [&](std::vector<uint32_t>& place, int row, int output, int number) {  // eight outputs in a word
        const int nibble = by_output ? static_cast<int>(std::find(kOrder, kOrder + 8, output % 8) - kOrder) : output % 8;
        place[static_cast<std::size_t>(row) * (kOutputs / 8) + output / 8] |= static_cast<uint32_t>(number) << 4 * nibble;
    };
    for (int output = 0; output < kOutputs; ++output) {
        for (int i = 0; i < inputs; ++i) {
            const int number = q[static_cast<std::size_t>(output) * inputs + i];
            if (by_output)
                put(words, i, output, number);
            else
                words[static_cast<std::size_t>(i / 8) * kOutputs + output] |= static_cast<uint32_t>(number) << 4 * (i % 8);
        }
        for (int at = 0; at < groups; ++at) put(zero_words, at, output, zeros[output * groups + at]);
    }
    const FileBlock block = file_block(format);
    const int64_t row_bytes = static_cast<int64_t>(inputs / block.inputs) * block.bytes;
    std::vector<uint8_t> blocks(kOutputs * row_bytes);
    blocks_of_words({words.data(), zero_words.data(), scales.data(), kOutputs, inputs, group, by_output, first_zero}, format,
                    blocks.data());
    std::vector<int> rows(kOutputs);
    for (int i = 0; i < kOutputs; ++i) rows[i] = i;
    Stored stored{{{format, blocks.data(), kOutputs, row_bytes}}, rows.data(), kOutputs, inputs, 0};
    const Matrix matrix(stored, nullptr);
    std::vector<float> row(round_up(inputs, kGroup));
    for (int output = 0; output < kOutputs; ++output) {
        matrix.row(output, row.data());
        for (int i = 0; i < inputs; ++i) {
            const int zero = zeros[output * groups + i / group] + first_zero;
            const float scale = half_to_float({scales[static_cast<std::size_t>(i / group) * kOutputs + output]});
            check(row[i] == scale * static_cast<float>(q[static_cast<std::size_t>(output) * inputs + i] - zero),
                  "words mean what their blocks do");
        }
    }
}

}  // namespace

void test_sources() {
    test_int8();
    for (Format format : {Format::f32, Format::f16, Format::bf16}) {
        test_floats(format, 64, 3);
        test_floats(format, 48, 2);
        test_floats(format, 5, 3);
    }
    for (bool by_output : {false, true}) {
        test_words(by_output, Format::u4_32, 32, 160);
        test_words(by_output, Format::u4_64, 64, 192);
        test_words(by_output, Format::u4_64, 128, 448);  // the last group has half as many
        test_words(by_output, Format::u4_64, 192, 192);  // all of them are one group
    }
}

}  // namespace outpace

#include "stored.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "blocks.h"
#include "half.h"

namespace outpace {
namespace {

constexpr int kMaxExponent = 252;  // of MXFP4: the largest number, 12 times half of 2^(252 - 127), is finite

bool is_finite(uint16_t half) { return (half & 0x7c00u) != 0x7c00u; }

template <class F>
bool is_finite(const Group& group) {
    if (F::kHasExponents) return group.numbers[0][0] <= kMaxExponent && group.numbers[1][0] <= kMaxExponent;
    if (F::kIsSuper) return is_finite(group.scales[0]) && is_finite(group.scales[1]);
    for (int part = 0; part < F::kShares; ++part)
        if (!is_finite(group.numbers[part][0]) || !is_finite(group.numbers[part][1])) return false;
    return true;
}

/// Calls f with the parts of a group: its block, the upper bits of its c and m if these have six bits, c and m, and its
/// bits.
template <class F, class T>
struct Place {
    T *block, *high, *scales, *bits;
    int high_bit;

    Place(T* panel, int group) : block(panel + static_cast<int64_t>(group / F::kGroups) * F::kBlockBytes) {
        high = block + F::high_at(group), high_bit = F::high_bit(group);
        scales = block + F::kHeader + group % F::kGroups * F::kGroupBytes;
        bits = scales + F::kScales;
    }
};

/// Unpacks c and m of a group, six bits each.
template <class F>
void write_six_bits(const Group& group, const Place<F, uint8_t>& place, int lane) {
    for (int part = 0; part < F::kParts; ++part) {
        const int c = group.numbers[part][0], m = group.numbers[part][1], at = part * kPanel + lane;
        place.scales[at] = static_cast<uint8_t>((c & 15) | (m & 15) << 4);
        const int others = place.high[at] & ~(15 << place.high_bit);
        place.high[at] = static_cast<uint8_t>(others | (c >> 4 | m >> 4 << 2) << place.high_bit);
    }
}

template <class F>
void write_scales(const Group& group, const Place<F, uint8_t>& place, int lane) {
    if (F::kIsSuper)
        for (int which = 0; which < F::kNumbers; ++which)
            std::memcpy(place.block + (which * kPanel + lane) * 2, &group.scales[which], 2);
    if (F::kSixBits) {
        write_six_bits<F>(group, place, lane);
        return;
    }
    for (int share = 0; share < F::kShares; ++share)
        for (int which = 0; which < F::kNumbers; ++which) {
            const int at = (share * F::kNumbers + which) * kPanel + lane;  // little endian
            std::memcpy(place.scales + at * F::kNumberBytes, &group.numbers[share][which], F::kNumberBytes);
        }
}

template <class F>
void write_bits(const Group& group, uint8_t* low) {
    const auto put = [&](int step, uint32_t four) { std::memcpy(low + step * kStep, &four, 4); };
    if (F::kBits == 8) {
        for (int step = 0; step < kWords; ++step) put(step, group.words[step]);
        return;
    }
    constexpr int kLowSteps = F::kLow / kStep;
    for (int half = 0; half < kHalves; ++half) {
        const uint32_t* words = group.words + half * kHalfGroupWords;
        for (int i = 0; i < 4; ++i) put(half * 4 + i, (words[i] & kNibbles) | (words[i + 4] & kNibbles) << 4);
        uint32_t fifth = 0, pairs[2] = {};
        for (int step = 0; step < kHalfGroupWords; ++step) {
            fifth |= (words[step] >> 4 & 0x01010101u) << step;
            pairs[step % 2] |= (words[step] >> 4 & 0x03030303u) << (step / 2 * 2);
        }
        if (F::kBits == 5) put(kLowSteps + half, fifth);
        if (F::kBits == 6)
            for (int i = 0; i < 2; ++i) put(kLowSteps + half * 2 + i, pairs[i]);
    }
}

/// Returns the largest |x| of half a group, eight at a time.
float largest_of(const float* x) {
    float tops[8] = {};
    for (int i = 0; i < kHalfGroup; i += 8)
        for (int j = 0; j < 8; ++j) {
            const float size = std::fabs(x[i + j]);
            tops[j] = size > tops[j] ? size : tops[j];
        }
    return *std::max_element(tops, tops + 8);
}

/// Rounds half a group of weights to Q8_0. Adding 1.5 * 2^23 rounds a small number to a whole one, ties to even, and
/// leaves it in the lowest byte; `lrintf` would take one number at a time.
void round_half(const float* weights, int half, Group& group) {
    const Half half_scale = to_half_up(largest_of(weights) / 127.0f);
    const float scale = half_scale.bits ? half_to_float(half_scale) : 1.0f;
    group.numbers[half][0] = half_scale.bits;
    uint8_t bytes[kHalfGroup];
    for (int i = 0; i < kHalfGroup; ++i) {
        const float rounded = weights[i] / scale + 12582912.0f;
        uint32_t bits;
        std::memcpy(&bits, &rounded, 4);
        bytes[i] = static_cast<uint8_t>(bits + 128);
    }
    std::memcpy(group.words + half * kHalfGroupWords, bytes, kHalfGroup);
}

/// Writes a group to its place; returns false if a scale is not finite.
template <class F>
bool write(const Group& group, uint8_t* panel, int number, int lane) {
    const Place<F, uint8_t> place(panel, number);
    write_scales<F>(group, place, lane);
    write_bits<F>(group, place.bits + lane * 4);
    return is_finite<F>(group);
}

/// Returns the stored numbers of inputs 4 i to 4 i + 3 of a group, a byte each. `low`: start of the lane's bits.
template <class F>
uint32_t read_bits(const uint8_t* low, int i) {
    const int half = i / kHalfGroupWords, step = i % kHalfGroupWords;
    const auto at = [&](int line) { return word(low + line * kStep); };
    if (F::kBits == 8) return at(i);
    constexpr int kLowSteps = F::kLow / kStep;
    const uint32_t nibbles = at(half * 4 + step % 4) >> (step / 4 * 4) & kNibbles;
    if (F::kBits == 5) return nibbles | (at(kLowSteps + half) >> step & 0x01010101u) << 4;
    if (F::kBits == 6) return nibbles | (at(kLowSteps + half * 2 + step % 2) >> (step / 2 * 2) & 0x03030303u) << 4;
    return nibbles;
}

/// Returns c or m of a part.
template <class F>
float read_number(const Place<F, const uint8_t>& place, int part, int which, int lane) {
    const int at = F::number_at(part, which) + lane;
    if (F::kHasExponents) return power_of_two(place.scales[at]) * 0.5f;
    if (!F::kIsSuper) return half_to_float({short_word(place.scales + 2 * at)});
    int number = static_cast<int8_t>(place.scales[F::kSixBits ? part * kPanel + lane : at]);
    if (F::kSixBits) {
        const int high = place.high[part * kPanel + lane] >> place.high_bit >> 2 * which & 3;
        number = (number >> 4 * which & 15) | high << 4;
    }
    return static_cast<float>(number) * half_to_float({short_word(place.block + (which * kPanel + lane) * 2)});
}

}  // namespace

int64_t panel_bytes(Format format, int groups) {
    return with_format(format, [&](auto f) { return decltype(f)::panel_bytes(groups); });
}

bool pack_stored(Format format, const uint8_t* row, const Stored& stored, uint8_t* panel, int number, int lane) {
    const Group group = unpack(format, row, stored, number);
    return with_format(format, [&](auto f) { return write<decltype(f)>(group, panel, number, lane); });
}

/// Reads group `number` of a row of the file as float32; `row` null: zeros.
static void read_group(Format format, const uint8_t* row, const Stored& stored, int number, float* out) {
    std::fill(out, out + kGroup, 0.0f);
    if (!row) return;
    if (is_float(format)) return read_floats(format, row, stored, number, out);
    const Group group = unpack(format, row, stored, number);
    with_format(format, [&](auto f) {
        using F = decltype(f);
        uint8_t block[F::kBlockBytes];
        std::fill(block, block + F::kHeader, uint8_t{0});
        write<F>(group, block, number % F::kGroups, 0);
        read_stored(format, block, number % F::kGroups, 0, out);
    });
}

void read_row(Format format, const uint8_t* row, int inputs, float* out) {
    const Stored stored{{}, nullptr, 0, inputs, 0};
    for (int group = 0; group < round_up(inputs, kGroup) / kGroup; ++group)
        read_group(format, row, stored, group, out + group * kGroup);
}

const char* pack_panel(const Stored& stored, Format to, int number, uint8_t* panel) {
    const uint8_t* rows[kPanel];
    Format format = to;
    for (int lane = 0; lane < kPanel; ++lane) rows[lane] = stored.find(number * kPanel + lane, &format);
    const bool rounds = format != to;
    const char* wrong = nullptr;
    for (int group = 0; group < round_up(stored.inputs, kGroup) / kGroup; ++group)
        for (int lane = 0; lane < kPanel; ++lane) {
            if (!rounds) {
                if (!pack_stored(format, rows[lane], stored, panel, group, lane)) wrong = "a scale is not finite";
                continue;
            }
            float weights[kGroup];
            read_group(format, rows[lane], stored, group, weights);
            if (!are_finite(weights, kGroup)) return "a weight is not finite";
            if (!pack_floats(weights, panel, group, lane)) wrong = "a weight is too large for int8: above 8.3 million";
        }
    return wrong;
}

bool takes_quarters(Format format) {
    return with_format(format, [](auto f) { return decltype(f)::kParts == kQuarters; });
}

bool pack_floats(const float* weights, uint8_t* panel, int number, int lane) {
    Group group{};
    for (int half = 0; half < kHalves; ++half) round_half(weights + half * kHalfGroup, half, group);
    return write<Q80>(group, panel, number, lane);
}

bool are_finite(const float* x, int count) {
    uint32_t top = 0;  // the largest exponent
    for (int i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        top = std::max(top, bits & 0x7f800000u);
    }
    return top != 0x7f800000u;
}

void read_floats(Format format, const uint8_t* row, const Stored& stored, int number, float* out) {
    const Stored::Run run = stored.run_at(number * kGroup);
    const int count = std::clamp(run.count, 0, kGroup);
    row += static_cast<int64_t>(run.first) * file_block(format).bytes;
    if (format == Format::f32)
        std::memcpy(out, row, sizeof(float) * count);
    else if (format == Format::f16)
        for (int i = 0; i < count; ++i) out[i] = half_to_float({short_word(row + 2 * i)});
    else
        for (int i = 0; i < count; ++i) out[i] = from_bfloat16(short_word(row + 2 * i));
}

void read_stored(Format format, const uint8_t* panel, int number, int lane, float* out) {
    with_format(format, [&](auto f) {
        using F = decltype(f);
        const Place<F, const uint8_t> place(panel, number);
        uint8_t numbers[kGroup];
        for (int i = 0; i < kWords; ++i) {
            const uint32_t four = read_bits<F>(place.bits + lane * 4, i);
            std::memcpy(numbers + 4 * i, &four, 4);
        }
        if constexpr (F::kHasTable)
            for (uint8_t& number : numbers) number = F::kTable[number];
        for (int part = 0; part < F::kParts; ++part) {
            const float c = read_number<F>(place, part, 0, lane);
            const float stored_m = F::kHasMin ? read_number<F>(place, part, 1, lane) : 0;
            const float m = F::kMinInSteps ? stored_m * c : stored_m;
            for (int input = part * F::kPart; input < (part + 1) * F::kPart; ++input) {
                const float value = c * static_cast<float>(numbers[input] - F::kBias);  // exact
                out[input] = F::kHasMin ? value + m : value;
            }
        }
    });
}

const uint8_t* Stored::find(int output, Format* format) const {
    int64_t row = output < outputs ? rows[output] : -1;
    if (row < 0) return nullptr;
    for (const StoredRows& part : parts) {
        *format = part.format;
        if (row < part.rows) return part.data + row * part.row_bytes;
        row -= part.rows;
    }
    throw std::invalid_argument("a row is out of range");
}

void Stored::check() const {
    if (outputs < 1 || inputs < 1) throw std::invalid_argument("a matrix must not be empty");
    const int unit = has_floats() ? 1 : kHalfGroup;
    if (chunk && (chunk < 0 || chunk % unit || inputs % round_up(chunk, kGroup)))
        throw std::invalid_argument("chunk does not fit");
    for (const StoredRows& part : parts) {
        if (has_floats() ? part.format != parts[0].format : is_float(part.format))
            throw std::invalid_argument("floats are of one format for the whole matrix");
        const FileBlock block = file_block(part.format);
        if (block.inputs > kHalfGroup && chunk % kGroup) throw std::invalid_argument("chunk does not fit the format");
        if (file_inputs() % block.inputs || part.row_bytes != static_cast<int64_t>(file_inputs()) / block.inputs * block.bytes)
            throw std::invalid_argument("a part has rows of another size");
    }
    Format ignored;
    for (int output = 0; output < outputs; ++output) find(output, &ignored);
}

}  // namespace outpace

#include "stored.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "half.h"

namespace outpace {
namespace {

struct Named {
    Format format;
    const char* name;
    FileBlock block;
};

constexpr Named kNames[] = {
    {Format::q4_0, "Q4_0", {32, 18}},  {Format::q4_1, "Q4_1", {32, 20}},     {Format::q5_0, "Q5_0", {32, 22}},
    {Format::q5_1, "Q5_1", {32, 24}},  {Format::q8_0, "Q8_0", {32, 34}},     {Format::iq4_nl, "IQ4_NL", {32, 18}},
    {Format::q4_k, "Q4_K", {256, 144}}, {Format::q5_k, "Q5_K", {256, 176}}, {Format::q6_k, "Q6_K", {256, 210}},
};

const Named& named(Format format) {
    for (const Named& one : kNames)
        if (one.format == format) return one;
    throw std::invalid_argument("int8 is no format of a file");
}

constexpr uint32_t kNibbles = 0x0f0f0f0f;
constexpr int kWords = kGroup / 4;
constexpr int kHalfWords = kHalf / 4;

uint32_t word(const uint8_t* p) {
    uint32_t four;
    std::memcpy(&four, p, 4);
    return four;
}

uint16_t short_word(const uint8_t* p) {
    uint16_t two;
    std::memcpy(&two, p, 2);
    return two;
}

bool is_finite(uint16_t half) { return (half & 0x7c00u) != 0x7c00u; }

/// One group of one output: four inputs in a word, each in a byte of its own.
struct Group {
    uint32_t words[kWords];
    uint16_t scales[2];      // of the block: c and m, as half precision
    uint16_t numbers[4][2];  // of each part: c and m, as half precision or whole numbers
};

/// Adds bit 4 of every number: `bits` holds the 32 of a half, the first in the lowest bit.
void add_fifth_bits(uint32_t bits, uint32_t* words) {
    for (int i = 0; i < kHalf; ++i) words[i / 4] |= (bits >> i & 1u) << (8 * (i % 4) + 4);
}

/// Blocks of 32 inputs: one half of a group.
void unpack_half(Format format, const uint8_t* block, int half, Group& group) {
    uint32_t* words = group.words + half * kHalfWords;
    const bool has_min = format == Format::q4_1 || format == Format::q5_1;
    group.numbers[half][0] = short_word(block);
    group.numbers[half][1] = has_min ? short_word(block + 2) : 0;
    const uint8_t* bytes = block + (has_min ? 4 : 2);
    if (format == Format::q8_0) {
        for (int i = 0; i < kHalfWords; ++i) words[i] = word(bytes + 4 * i) ^ 0x80808080u;
        return;
    }
    const bool has_fifth = format == Format::q5_0 || format == Format::q5_1;
    const uint8_t* low = bytes + (has_fifth ? 4 : 0);
    for (int i = 0; i < kHalfWords / 2; ++i) {
        words[i] = word(low + 4 * i) & kNibbles;
        words[i + kHalfWords / 2] = word(low + 4 * i) >> 4 & kNibbles;
    }
    if (has_fifth) add_fifth_bits(word(bytes), words);
}

/// c and m of part `part` of eight, six bits each, in twelve bytes.
void unpack_six_bits(const uint8_t* p, int part, uint16_t* numbers) {
    if (part < 4) {
        numbers[0] = p[part] & 63;
        numbers[1] = p[part + 4] & 63;
    } else {
        numbers[0] = static_cast<uint16_t>((p[part + 4] & 15) | p[part - 4] >> 6 << 4);
        numbers[1] = static_cast<uint16_t>(p[part + 4] >> 4 | p[part] >> 6 << 4);
    }
}

/// Group `at` of four of a block of Q4_K or Q5_K.
void unpack_k45(const uint8_t* block, bool has_fifth, int at, Group& group) {
    group.scales[0] = short_word(block);
    group.scales[1] = short_word(block + 2) ^ 0x8000u;  // it is taken away
    for (int part = 0; part < 2; ++part) unpack_six_bits(block + 4, 2 * at + part, group.numbers[part]);
    const uint8_t *fifth = block + 16, *low = block + (has_fifth ? 48 : 16) + 32 * at;
    for (int i = 0; i < kHalfWords; ++i) {
        const uint32_t high = has_fifth ? word(fifth + 4 * i) >> (2 * at) : 0;
        group.words[i] = (word(low + 4 * i) & kNibbles) | (high & 0x01010101u) << 4;
        group.words[i + kHalfWords] = (word(low + 4 * i) >> 4 & kNibbles) | (high >> 1 & 0x01010101u) << 4;
    }
}

/// Group `at` of four of a block of Q6_K.
void unpack_k6(const uint8_t* block, int at, Group& group) {
    const uint8_t *low = block + 64 * (at / 2), *high = block + 128 + 32 * (at / 2), *scales = block + 192 + 4 * at;
    const int shift = 4 * (at % 2);
    group.scales[0] = short_word(block + 208);
    for (int part = 0; part < 4; ++part) group.numbers[part][0] = scales[part];
    for (int i = 0; i < kWords; ++i) {
        const uint32_t pair = word(high + 4 * (i % kHalfWords)) >> (shift + 2 * (i / kHalfWords));
        group.words[i] = (word(low + 4 * i) >> shift & kNibbles) | (pair & 0x03030303u) << 4;
    }
}

/// The block of 32 inputs that is half `half` of a group; below 0 where the group is padded there.
int find_block(const Stored& stored, int group, int half) {
    int first = group * kGroup + half * kHalf, most = stored.inputs, before = 0;
    if (stored.chunk) {
        const int room = round_up(stored.chunk, kGroup);
        before = first / room * stored.chunk;
        first %= room;
        most = stored.chunk;
    }
    return first < most ? (before + first) / kHalf : -1;
}

Group unpack(Format format, const uint8_t* row, const Stored& stored, int number) {
    Group group{};
    if (!row) return group;
    const FileBlock block = file_block(format);
    if (block.inputs == kHalf) {
        for (int half = 0; half < kHalves; ++half) {
            const int found = find_block(stored, number, half);
            if (found >= 0) unpack_half(format, row + static_cast<int64_t>(found) * block.bytes, half, group);
        }
        return group;
    }
    const uint8_t* from = row + static_cast<int64_t>(number / kSuperGroups) * block.bytes;
    if (format == Format::q6_k)
        unpack_k6(from, number % kSuperGroups, group);
    else
        unpack_k45(from, format == Format::q5_k, number % kSuperGroups, group);
    return group;
}

template <class F>
bool is_finite(const Group& group) {
    if (F::kIsSuper) return is_finite(group.scales[0]) && is_finite(group.scales[1]);
    for (int part = 0; part < F::kParts; ++part)
        if (!is_finite(group.numbers[part][0]) || !is_finite(group.numbers[part][1])) return false;
    return true;
}

/// Where a group lies: its block's scales, and what is its own.
template <class F, class T>
struct Place {
    T* header;
    T* own;

    Place(T* panel, int group)
        : header(panel + static_cast<int64_t>(group / F::kGroups) * F::kBlockBytes),
          own(header + F::kHeader + group % F::kGroups * F::kGroupBytes) {}
};

template <class F>
void write_scales(const Group& group, const Place<F, uint8_t>& place, int lane) {
    if (F::kIsSuper)
        for (int which = 0; which < F::kNumbers; ++which)
            std::memcpy(place.header + (which * kPanel + lane) * 2, &group.scales[which], 2);
    for (int part = 0; part < F::kParts; ++part)
        for (int which = 0; which < F::kNumbers; ++which) {
            const int at = (part * F::kNumbers + which) * kPanel + lane;  // the lower byte of a number is its first
            std::memcpy(place.own + at * F::kNumberBytes, &group.numbers[part][which], F::kNumberBytes);
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
        const uint32_t* words = group.words + half * kHalfWords;
        for (int i = 0; i < 4; ++i) put(half * 4 + i, (words[i] & kNibbles) | (words[i + 4] & kNibbles) << 4);
        uint32_t fifth = 0, pairs[2] = {};
        for (int step = 0; step < kHalfWords; ++step) {
            fifth |= (words[step] >> 4 & 0x01010101u) << step;
            pairs[step % 2] |= (words[step] >> 4 & 0x03030303u) << (step / 2 * 2);
        }
        if (F::kBits == 5) put(kLowSteps + half, fifth);
        if (F::kBits == 6)
            for (int i = 0; i < 2; ++i) put(kLowSteps + half * 2 + i, pairs[i]);
    }
}

/// The numbers of inputs 4 i to 4 i + 3 of a group, a byte each, as they are held. `low`: where its lane's bits begin.
template <class F>
uint32_t read_bits(const uint8_t* low, int i) {
    const int half = i / kHalfWords, step = i % kHalfWords;
    const auto at = [&](int line) { return word(low + line * kStep); };
    if (F::kBits == 8) return at(i);
    constexpr int kLowSteps = F::kLow / kStep;
    const uint32_t nibbles = at(half * 4 + step % 4) >> (step / 4 * 4) & kNibbles;
    if (F::kBits == 5) return nibbles | (at(kLowSteps + half) >> step & 0x01010101u) << 4;
    if (F::kBits == 6) return nibbles | (at(kLowSteps + half * 2 + step % 2) >> (step / 2 * 2) & 0x03030303u) << 4;
    return nibbles;
}

/// c or m of a part.
template <class F>
float read_number(const Place<F, const uint8_t>& place, int part, int which, int lane) {
    const int at = (part * F::kNumbers + which) * kPanel + lane;
    if (!F::kIsSuper) return half_to_float({short_word(place.own + 2 * at)});
    return static_cast<float>(static_cast<int8_t>(place.own[at])) *
           half_to_float({short_word(place.header + (which * kPanel + lane) * 2)});
}

}  // namespace

Format format_of(const char* name) {
    for (const Named& one : kNames)
        if (!std::strcmp(one.name, name)) return one.format;
    throw std::invalid_argument("the format " + std::string(name) + " is not known");
}

const char* name_of(Format format) { return format == Format::int8 ? "int8" : named(format).name; }

FileBlock file_block(Format format) { return named(format).block; }

int64_t panel_bytes(Format format, int groups) {
    if (format == Format::int8) return static_cast<int64_t>(groups) * kBlock;
    return with_format(format, [&](auto f) { return decltype(f)::panel_bytes(groups); });
}

bool pack_stored(Format format, const uint8_t* row, const Stored& stored, uint8_t* panel, int number, int lane) {
    const Group group = unpack(format, row, stored, number);
    return with_format(format, [&](auto f) {
        using F = decltype(f);
        const Place<F, uint8_t> place(panel, number);
        write_scales<F>(group, place, lane);
        write_bits<F>(group, place.own + F::kScales + lane * 4);
        return is_finite<F>(group);
    });
}

void read_stored(Format format, const uint8_t* panel, int number, int lane, float* out) {
    with_format(format, [&](auto f) {
        using F = decltype(f);
        const Place<F, const uint8_t> place(panel, number);
        uint8_t numbers[kGroup];
        for (int i = 0; i < kWords; ++i) {
            const uint32_t four = read_bits<F>(place.own + F::kScales + lane * 4, i);
            std::memcpy(numbers + 4 * i, &four, 4);
        }
        if (F::kHasTable)
            for (uint8_t& number : numbers) number = kTable[number];
        for (int part = 0; part < F::kParts; ++part) {
            const float c = read_number<F>(place, part, 0, lane), m = F::kHasMin ? read_number<F>(place, part, 1, lane) : 0;
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
    if (chunk && (chunk < 0 || chunk % kHalf || inputs % round_up(chunk, kGroup)))
        throw std::invalid_argument("chunk does not fit");
    for (const StoredRows& part : parts) {
        const FileBlock block = file_block(part.format);
        if (block.inputs > kGroup && chunk % kGroup) throw std::invalid_argument("chunk does not fit the format");
        if (file_inputs() % block.inputs || part.row_bytes != static_cast<int64_t>(file_inputs()) / block.inputs * block.bytes)
            throw std::invalid_argument("a part has rows of another size");
    }
}

}  // namespace outpace

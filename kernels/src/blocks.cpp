#include "blocks.h"

#include <stdexcept>
#include <string>

namespace outpace {
namespace {

/// Adds bit 4 to 32 numbers; `bits` holds them, the first in the lowest bit.
void add_fifth_bits(uint32_t bits, uint32_t* words) {
    for (int i = 0; i < kHalfGroup; ++i) words[i / 4] |= (bits >> i & 1u) << (8 * (i % 4) + 4);
}

/// Unpacks 32 nibbles of 16 bytes: the lower ones, then the upper ones.
void unpack_nibbles(const uint8_t* low, uint32_t* words) {
    for (int i = 0; i < kHalfGroupWords / 2; ++i) {
        words[i] = word(low + 4 * i) & kNibbles;
        words[i + kHalfGroupWords / 2] = word(low + 4 * i) >> 4 & kNibbles;
    }
}

/// Unpacks a block of 32 inputs, one half of a group.
void unpack_half(Format format, const uint8_t* block, int half, Group& group) {
    uint32_t* words = group.words + half * kHalfGroupWords;
    const bool has_min = format == Format::q4_1 || format == Format::q5_1 || format == Format::u4_32;
    const bool has_exponent = format == Format::mxfp4;
    group.numbers[half][0] = has_exponent ? block[0] : short_word(block);
    group.numbers[half][1] = has_min ? short_word(block + 2) : 0;
    const uint8_t* bytes = block + (has_min ? 4 : has_exponent ? 1 : 2);
    if (format == Format::q8_0) {
        for (int i = 0; i < kHalfGroupWords; ++i) words[i] = word(bytes + 4 * i) ^ 0x80808080u;
        return;
    }
    const bool has_fifth = format == Format::q5_0 || format == Format::q5_1;
    unpack_nibbles(bytes + (has_fifth ? 4 : 0), words);
    if (has_fifth) add_fifth_bits(word(bytes), words);
}

/// Unpacks a block of U4_64, a whole group.
void unpack_group(const uint8_t* block, Group& group) {
    for (int which = 0; which < 2; ++which) group.numbers[0][which] = short_word(block + 2 * which);
    for (int half = 0; half < kHalves; ++half)
        unpack_nibbles(block + 4 + half * kHalfGroup / 2, group.words + half * kHalfGroupWords);
}

/// Unpacks c and m, six bits each, of one of eight parts, from twelve bytes.
void unpack_six_bits(const uint8_t* p, int part, uint16_t* numbers) {
    if (part < 4) {
        numbers[0] = p[part] & 63;
        numbers[1] = p[part + 4] & 63;
    } else {
        numbers[0] = static_cast<uint16_t>((p[part + 4] & 15) | p[part - 4] >> 6 << 4);
        numbers[1] = static_cast<uint16_t>(p[part + 4] >> 4 | p[part] >> 6 << 4);
    }
}

/// Unpacks group `at` of the four in a block of Q4_K or Q5_K.
void unpack_k45(const uint8_t* block, bool has_fifth, int at, Group& group) {
    group.scales[0] = short_word(block);
    group.scales[1] = short_word(block + 2) ^ 0x8000u;  // it is subtracted
    for (int part = 0; part < 2; ++part) unpack_six_bits(block + 4, 2 * at + part, group.numbers[part]);
    const uint8_t *fifth = block + 16, *low = block + (has_fifth ? 48 : 16) + 32 * at;
    for (int i = 0; i < kHalfGroupWords; ++i) {
        const uint32_t high = has_fifth ? word(fifth + 4 * i) >> (2 * at) : 0;
        group.words[i] = (word(low + 4 * i) & kNibbles) | (high & 0x01010101u) << 4;
        group.words[i + kHalfGroupWords] = (word(low + 4 * i) >> 4 & kNibbles) | (high >> 1 & 0x01010101u) << 4;
    }
}

/// Unpacks group `at` of the four in a block of Q6_K.
void unpack_k6(const uint8_t* block, int at, Group& group) {
    const uint8_t *low = block + 64 * (at / 2), *high = block + 128 + 32 * (at / 2), *scales = block + 192 + 4 * at;
    const int shift = 4 * (at % 2);
    group.scales[0] = short_word(block + 208);
    for (int part = 0; part < 4; ++part) group.numbers[part][0] = scales[part];
    for (int i = 0; i < kWords; ++i) {
        const uint32_t pair = word(high + 4 * (i % kHalfGroupWords)) >> (shift + 2 * (i / kHalfGroupWords));
        group.words[i] = (word(low + 4 * i) >> shift & kNibbles) | (pair & 0x03030303u) << 4;
    }
}

/// Returns the index of the block of 32 inputs that is half `half` of a group, or a negative number for padding.
int find_block(const Stored& stored, int group, int half) {
    const Stored::Run run = stored.run_at(group * kGroup + half * kHalfGroup);
    return run.count > 0 ? run.first / kHalfGroup : -1;
}

}  // namespace

Format format_of(const char* name) {
    for (const FileFormat& candidate : kFileFormats)
        if (!std::strcmp(candidate.name, name)) return candidate.format;
    throw std::invalid_argument("the format " + std::string(name) + " is not known");
}

const char* name_of(Format format) { return file_format(format).name; }

Group unpack(Format format, const uint8_t* row, const Stored& stored, int number) {
    Group group{};
    if (!row) return group;
    const FileBlock block = file_block(format);
    if (block.inputs == kHalfGroup) {
        for (int half = 0; half < kHalves; ++half) {
            const int found = find_block(stored, number, half);
            if (found >= 0) unpack_half(format, row + static_cast<int64_t>(found) * block.bytes, half, group);
        }
        return group;
    }
    const uint8_t* from = row + static_cast<int64_t>(number) * kGroup / block.inputs * block.bytes;
    if (format == Format::u4_64)
        unpack_group(from, group);
    else if (format == Format::q6_k)
        unpack_k6(from, number % kSuperGroups, group);
    else
        unpack_k45(from, format == Format::q5_k, number % kSuperGroups, group);
    return group;
}

}  // namespace outpace

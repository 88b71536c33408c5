// Blocks of a file, unpacked to a common form: groups of inputs.
#pragma once

#include <cstring>

#include "stored.h"

namespace outpace {

constexpr uint32_t kNibbles = 0x0f0f0f0f;
constexpr int kWords = kGroup / 4;
constexpr int kHalfGroupWords = kHalfGroup / 4;

inline uint32_t word(const uint8_t* p) {
    uint32_t four;
    std::memcpy(&four, p, 4);
    return four;
}

inline uint16_t short_word(const uint8_t* p) {
    uint16_t two;
    std::memcpy(&two, p, 2);
    return two;
}

/// One group of one output: four inputs per word, one in each byte.
struct Group {
    uint32_t words[kWords];
    uint16_t scales[2];  // c and m of the block, half precision
    uint16_t numbers[4][2];  // c and m of each part, half precision or whole numbers
};

/// Unpacks group `number` of a row; zeros for padding, or if `row` is null.
Group unpack(Format format, const uint8_t* row, const Stored& stored, int number);

}  // namespace outpace

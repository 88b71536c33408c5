// The blocks of a file, and what a group of inputs is in all of them.
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

/// One group of one output: four inputs in a word, each in a byte of its own.
struct Group {
    uint32_t words[kWords];
    uint16_t scales[2];      // of the block: c and m, as half precision
    uint16_t numbers[4][2];  // of each part that has its own: c and m, half precision or whole numbers
};

/// Group `number` of a row of the file, zeros where it is padded; `row` null: all zeros.
Group unpack(Format format, const uint8_t* row, const Stored& stored, int number);

}  // namespace outpace

#include "words.h"

#include <algorithm>

#include "file_blocks.h"
#include "half.h"

namespace outpace {
namespace {

constexpr int kNibblesOfWord = 8;
constexpr int kPart = 32;  // inputs whose nibbles are packed together: input i and input i + 16 in one byte
constexpr int kNumbers = 4;  // bytes of a block before its nibbles: scale and -zero
constexpr int kTile = 128;  // outputs whose words are read while their lines are cached
constexpr int kOrder[kNibblesOfWord] = {0, 2, 4, 6, 1, 3, 5, 7};  // output of each nibble in AWQ's words

/// Spreads the nibbles of a word to bytes, the first to the lowest byte.
uint64_t spread(uint32_t word) {
    uint64_t bytes = word;
    bytes = (bytes | bytes << 16) & 0x0000ffff0000ffffu;
    bytes = (bytes | bytes << 8) & 0x00ff00ff00ff00ffu;
    return (bytes | bytes << 4) & 0x0f0f0f0f0f0f0f0fu;
}

/// Returns byte `number` of eight, the first being the lowest.
uint8_t byte_of(uint64_t bytes, int number) { return static_cast<uint8_t>(bytes >> 8 * number); }

/// Returns which nibble of its word belongs to an output.
int nibble_of(const Words& words, int output) {
    const int number = output % kNibblesOfWord;
    return words.by_output ? static_cast<int>(std::find(kOrder, kOrder + kNibblesOfWord, number) - kOrder) : number;
}

/// Writes scale and -zero of an output's block.
void write_numbers(const Words& words, int output, int group, uint8_t* block) {
    const uint32_t word = words.zeros[static_cast<int64_t>(group) * (words.outputs / kNibblesOfWord) + output / kNibblesOfWord];
    const int zero = static_cast<int>(word >> 4 * nibble_of(words, output) & 15) + words.first_zero;
    const Half negated = float_to_half(-static_cast<float>(zero));
    std::memcpy(block, words.scales + static_cast<int64_t>(group) * words.outputs + output, 2);
    std::memcpy(block + 2, &negated.bits, 2);
}

/// Writes 32 inputs from `first` on of one output whose words hold eight inputs each: 16 bytes.
void write_inputs(const Words& words, int output, int first, uint8_t* bytes) {
    const uint32_t* word = words.weights + static_cast<int64_t>(first / kNibblesOfWord) * words.outputs + output;
    for (int half = 0; half < 2; ++half, word += words.outputs) {
        const uint64_t both = spread(word[0]) | spread(word[2 * static_cast<int64_t>(words.outputs)]) << 4;
        for (int i = 0; i < kNibblesOfWord; ++i) bytes[half * kNibblesOfWord + i] = byte_of(both, i);
    }
}

/// Writes 32 inputs from `first` on of eight outputs that share words: 16 bytes each, at distance `stride`.
void write_outputs(const Words& words, int output, int first, uint8_t* bytes, int64_t stride) {
    const int64_t row = words.outputs / kNibblesOfWord;
    const uint32_t* word = words.weights + first * row + output / kNibblesOfWord;
    for (int i = 0; i < kPart / 2; ++i, word += row) {
        const uint64_t both = spread(word[0]) | spread(word[kPart / 2 * row]) << 4;
        for (int place = 0; place < kNibblesOfWord; ++place) bytes[kOrder[place] * stride + i] = byte_of(both, place);
    }
}

}  // namespace

void blocks_of_words(const Words& words, Format format, uint8_t* out) {
    const FileBlock block = file_block(format);
    const int64_t stride = static_cast<int64_t>(words.inputs / block.inputs) * block.bytes;
    for (int start = 0; start < words.outputs; start += kTile) {
        const int end = std::min(start + kTile, words.outputs);
        for (int first = 0; first < words.inputs; first += block.inputs) {
            uint8_t* place = out + first / block.inputs * block.bytes;
            for (int output = start; output < end; ++output)
                write_numbers(words, output, first / words.group, place + output * stride);
            for (int part = 0; part < block.inputs; part += kPart) {
                uint8_t* bytes = place + kNumbers + part / 2;
                if (words.by_output)
                    for (int output = start; output < end; output += kNibblesOfWord)
                        write_outputs(words, output, first + part, bytes + output * stride, stride);
                else
                    for (int output = start; output < end; ++output)
                        write_inputs(words, output, first + part, bytes + output * stride);
            }
        }
    }
}

}  // namespace outpace

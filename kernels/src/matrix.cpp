#include "matrix.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace outpace {
namespace {

float from_bfloat16(uint16_t high) {
    const uint32_t bits = static_cast<uint32_t>(high) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

/// The smallest bfloat16 number that is not below `value` >= 0.
uint16_t to_bfloat16_up(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>((bits + 0xffffu) >> 16);
}

}  // namespace

Matrix::Matrix(const float* weights, const float* bias, int outputs, int inputs)
    : outputs_(outputs), inputs_(inputs), groups_(round_up(inputs, kGroup) / kGroup) {
    const int padded = round_up(outputs, kPanel);
    home_ = std::make_shared<const Block<uint8_t>>(panel_bytes());
    blocks_ = home_->data();
    for (int output = 0; output < padded; ++output)
        for (int group = 0; group < groups_; ++group) {
            const int first = group * kGroup;
            const int count = output < outputs ? std::min(kGroup, inputs - first) : 0;
            pack_group(count ? weights + static_cast<int64_t>(output) * inputs + first : nullptr, count, output, group);
        }
    if (bias) {
        bias_.assign(bias, bias + outputs);
        bias_.resize(padded, 0.0f);
    }
}

Matrix::Matrix(const Matrix& other, std::shared_ptr<const Block<uint8_t>> home, std::size_t start)
    : outputs_(other.outputs_),
      inputs_(other.inputs_),
      groups_(other.groups_),
      bias_(other.bias_),
      home_(std::move(home)),
      blocks_(home_->data() + start) {
    std::memcpy(blocks_, other.blocks_, panel_bytes());
}

uint8_t* Matrix::block(int output, int group) const {
    return blocks_ + (static_cast<int64_t>(output / kPanel) * groups_ + group) * kBlock;
}

void Matrix::pack_group(const float* weights, int count, int output, int group) {
    float top = 0.0f;
    for (int i = 0; i < count; ++i) top = std::max(top, std::fabs(weights[i]));
    const uint16_t high = top > 1e-30f ? to_bfloat16_up(top / 127.0f) : 0;
    const float scale = from_bfloat16(high);
    uint8_t* place = block(output, group);
    const int lane = output % kPanel;
    std::memcpy(place + 2 * lane, &high, 2);
    for (int i = 0; i < kGroup; ++i) {
        const long q = i < count && high ? std::lrintf(weights[i] / scale) : 0;
        place[kBlockScales + i / 4 * kStep + lane * 4 + i % 4] = static_cast<uint8_t>(q + 128);
    }
}

void Matrix::row(int output, float* out) const {
    const int lane = output % kPanel;
    for (int group = 0; group < groups_; ++group) {
        const uint8_t* place = block(output, group);
        uint16_t high;
        std::memcpy(&high, place + 2 * lane, 2);
        const float scale = from_bfloat16(high);
        for (int i = 0; i < kGroup; ++i) {
            const int q = static_cast<int>(place[kBlockScales + i / 4 * kStep + lane * 4 + i % 4]) - 128;
            out[group * kGroup + i] = static_cast<float>(q) * scale;
        }
    }
}

void gather(std::initializer_list<std::shared_ptr<const Matrix>*> matrices) {
    std::size_t bytes = 0;
    for (const auto* matrix : matrices) bytes += *matrix ? (*matrix)->panel_bytes() : 0;
    const auto home = std::make_shared<const Block<uint8_t>>(bytes);
    std::size_t start = 0;
    for (auto* matrix : matrices) {
        if (!*matrix) continue;
        *matrix = std::make_shared<const Matrix>(**matrix, home, start);
        start += (*matrix)->panel_bytes();
    }
}

}  // namespace outpace

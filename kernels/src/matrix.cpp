#include "matrix.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "half.h"

namespace outpace {
namespace {

/// The largest |x| of kGroup numbers, eight side by side.
float largest_of(const float* x) {
    float tops[8] = {};
    for (int i = 0; i < kGroup; i += 8)
        for (int j = 0; j < 8; ++j) {
            const float size = std::fabs(x[i + j]);
            tops[j] = size > tops[j] ? size : tops[j];
        }
    return *std::max_element(tops, tops + 8);
}

/// kGroup weights of one output into its group's block. Adding 1.5 * 2^23 rounds a small number to a whole one, to even
/// where it is halfway, and leaves it in the lowest byte; `lrintf` would be one number at a time.
void pack_group(const float* weights, uint8_t* place, int lane) {
    const float top = largest_of(weights);
    const uint16_t high = top > 1e-30f ? to_bfloat16_up(top / 127.0f) : 0;
    const float scale = high ? from_bfloat16(high) : 1.0f;
    std::memcpy(place + 2 * lane, &high, 2);
    uint8_t bytes[kGroup];
    for (int i = 0; i < kGroup; ++i) {
        const float rounded = weights[i] / scale + 12582912.0f;
        uint32_t bits;
        std::memcpy(&bits, &rounded, 4);
        bytes[i] = static_cast<uint8_t>(bits + 128);
    }
    uint8_t* to = place + kBlockScales + lane * 4;
    for (int i = 0; i < kGroup; i += 4, to += kStep) std::memcpy(to, bytes + i, 4);
}

void read_group(const uint8_t* place, int lane, float* out) {
    uint16_t high;
    std::memcpy(&high, place + 2 * lane, 2);
    const float scale = from_bfloat16(high);
    for (int i = 0; i < kGroup; ++i) {
        const int q = static_cast<int>(place[kBlockScales + i / 4 * kStep + lane * 4 + i % 4]) - 128;
        out[i] = static_cast<float>(q) * scale;
    }
}

/// f(number) for every number below `count`, by so many threads.
template <class F>
void share(int threads, int count, F f) {
    threads = std::clamp(count, 1, threads);
    const auto work = [&](int part) {
        for (int i = count * part / threads; i < count * (part + 1) / threads; ++i) f(i);
    };
    std::vector<std::thread> others;
    for (int part = 1; part < threads; ++part) others.emplace_back(work, part);
    work(0);
    for (std::thread& other : others) other.join();
}

/// One section for all panels of one format that follow each other.
std::vector<Section> cut_sections(const Stored& stored, int groups) {
    std::vector<Section> sections;
    for (int output = 0; output < stored.outputs; ++output) {
        Format format;
        if (!stored.find(output, &format)) continue;
        if (!sections.empty() && sections.back().format == format) continue;
        if (!sections.empty() && output % kPanel) throw std::invalid_argument("a panel has two formats");
        const int first = sections.empty() ? 0 : output / kPanel;
        sections.push_back({format, first, panel_bytes(format, groups), nullptr});
    }
    if (sections.empty()) throw std::invalid_argument("a matrix must not be all zeros");
    return sections;
}

}  // namespace

Matrix::Matrix(const float* weights, const float* bias, int outputs, int inputs, int threads, Room* room)
    : outputs_(outputs), inputs_(inputs), groups_(round_up(inputs, kGroup) / kGroup) {
    pack(threads, room, [&](int output, int group, float* out) {
        const int first = group * kGroup, count = std::min(kGroup, inputs - first);
        std::fill(std::copy_n(weights + static_cast<int64_t>(output) * inputs + first, count, out), out + kGroup, 0.0f);
    });
    set_bias(bias);
}

Matrix::Matrix(const Matrix& other, int threads, Room* room)
    : outputs_(other.outputs_), inputs_(other.inputs_), groups_(other.groups_), bias_(other.bias_) {
    pack(threads, room, [&](int output, int group, float* out) { other.read(output, group, out); });
}

Matrix::Matrix(const Stored& stored, const float* bias, int threads, Room* room)
    : outputs_(stored.outputs), inputs_(stored.inputs), groups_(round_up(stored.inputs, kGroup) / kGroup) {
    stored.check();
    if (stored.has_floats())
        round(stored, threads, room);
    else
        keep(stored, threads, room);
    set_bias(bias);
}

/// Blocks of a file, as they are.
void Matrix::keep(const Stored& stored, int threads, Room* room) {
    allocate(cut_sections(stored, groups_), room);
    std::atomic<bool> is_sound{true};
    share(threads, panels().count(), [&](int number) {
        const Format format = panels().section(number).format;
        const uint8_t* rows[kPanel];
        Format ignored;
        for (int lane = 0; lane < kPanel; ++lane) rows[lane] = stored.find(number * kPanel + lane, &ignored);
        for (int group = 0; group < groups_; ++group)
            for (int lane = 0; lane < kPanel; ++lane)
                if (!pack_stored(format, rows[lane], stored, panel(number), group, lane)) is_sound = false;
    });
    if (!is_sound) throw std::domain_error("a scale is not finite");
}

/// Floats of a file, to int8, a group at a time.
void Matrix::round(const Stored& stored, int threads, Room* room) {
    std::atomic<bool> is_sound{true};
    pack(threads, room, [&](int output, int group, float* out) {
        Format format;
        const uint8_t* row = stored.find(output, &format);
        if (row && !read_floats(format, row, stored, group, out)) is_sound = false;
    });
    if (!is_sound) throw std::domain_error("a weight is not finite");
}

/// Makes room for all weights and rounds them to int8. `read` (output, group, out [kGroup]) gives some of them, zeros behind the last input.
template <class F>
void Matrix::pack(int threads, Room* room, F read) {
    allocate({{Format::int8, 0, outpace::panel_bytes(Format::int8, groups_), nullptr}}, room);
    share(threads, panels().count(), [&](int number) {
        uint8_t* place = panel(number);
        for (int group = 0; group < groups_; ++group, place += kBlock)
            for (int lane = 0; lane < kPanel; ++lane) {
                float weights[kGroup] = {};
                if (number * kPanel + lane < outputs_) read(number * kPanel + lane, group, weights);
                pack_group(weights, place, lane);
            }
    });
}

void Matrix::set_bias(const float* bias) {
    if (!bias) return;
    bias_.assign(bias, bias + outputs_);
    bias_.resize(round_up(outputs_, kPanel), 0.0f);
}

/// Room for the panels of these sections, one behind the other.
void Matrix::allocate(std::vector<Section> sections, Room* room) {
    sections_ = std::move(sections);
    const uint8_t* place;
    if (room) {
        auto [home, start] = room->take(panel_bytes());
        home_ = std::move(home), place = start;
    } else {
        home_ = std::make_shared<const Block<uint8_t>>(panel_bytes());
        place = home_->data();
    }
    for (std::size_t number = 0; number < sections_.size(); ++number) {
        const bool is_last = number + 1 == sections_.size();
        const int end = is_last ? panels().count() : sections_[number + 1].first;
        sections_[number].blocks = place;
        place += (end - sections_[number].first) * sections_[number].panel_bytes;
    }
}

std::size_t Matrix::panel_bytes() const {
    std::size_t total = 0;
    int end = panels().count();
    for (auto section = sections_.rbegin(); section != sections_.rend(); end = section->first, ++section)
        total += static_cast<std::size_t>(end - section->first) * section->panel_bytes;
    return total;
}

std::vector<Format> Matrix::formats() const {
    std::vector<Format> found;
    for (const Section& section : sections_) found.push_back(section.format);
    return found;
}

uint8_t* Matrix::panel(int number) const {
    return const_cast<uint8_t*>(Panels::blocks(panels().section(number), number));
}

void Matrix::row(int output, float* out) const {
    for (int group = 0; group < groups_; ++group, out += kGroup) read(output, group, out);
}

void Matrix::read(int output, int group, float* out) const {
    const Format format = panels().section(output / kPanel).format;
    const uint8_t* place = panel(output / kPanel);
    if (format == Format::int8)
        read_group(place + static_cast<int64_t>(group) * kBlock, output % kPanel, out);
    else
        read_stored(format, place, group, output % kPanel, out);
}

}  // namespace outpace

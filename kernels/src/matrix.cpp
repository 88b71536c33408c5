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

/// `count` <= kGroup weights (the rest is 0) of one output into its group's block.
void pack_group(const float* weights, int count, uint8_t* place, int lane) {
    float top = 0.0f;
    for (int i = 0; i < count; ++i) top = std::max(top, std::fabs(weights[i]));
    const uint16_t high = top > 1e-30f ? to_bfloat16_up(top / 127.0f) : 0;
    const float scale = from_bfloat16(high);
    std::memcpy(place + 2 * lane, &high, 2);
    for (int i = 0; i < kGroup; ++i) {
        const long q = i < count && high ? std::lrintf(weights[i] / scale) : 0;
        place[kBlockScales + i / 4 * kStep + lane * 4 + i % 4] = static_cast<uint8_t>(q + 128);
    }
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
    allocate({{Format::int8, 0, outpace::panel_bytes(Format::int8, groups_), nullptr}}, room);
    share(threads, panels().count(), [&](int number) {
        const float* rows[kPanel];
        for (int lane = 0; lane < kPanel; ++lane) {
            const int64_t output = number * kPanel + lane;
            rows[lane] = output < outputs ? weights + output * inputs : nullptr;
        }
        pack_panel(number, rows);
    });
    set_bias(bias);
}

Matrix::Matrix(const Matrix& other, int threads, Room* room)
    : outputs_(other.outputs_), inputs_(other.inputs_), groups_(other.groups_), bias_(other.bias_) {
    allocate({{Format::int8, 0, outpace::panel_bytes(Format::int8, groups_), nullptr}}, room);
    share(threads, panels().count(), [&](int number) {
        const int64_t stride = static_cast<int64_t>(groups_) * kGroup;
        std::vector<float> values(kPanel * stride);
        const float* rows[kPanel];
        for (int lane = 0; lane < kPanel; ++lane) {
            const int output = number * kPanel + lane;
            rows[lane] = output < outputs_ ? values.data() + lane * stride : nullptr;
            if (output < outputs_) other.row(output, values.data() + lane * stride);
        }
        pack_panel(number, rows);
    });
}

Matrix::Matrix(const Stored& stored, const float* bias, int threads, Room* room)
    : outputs_(stored.outputs), inputs_(stored.inputs), groups_(round_up(stored.inputs, kGroup) / kGroup) {
    stored.check();
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
    set_bias(bias);
}

/// One panel from the weights of its outputs; null: zeros.
void Matrix::pack_panel(int number, const float* const (&rows)[kPanel]) {
    uint8_t* place = panel(number);
    for (int group = 0; group < groups_; ++group, place += kBlock)
        for (int lane = 0; lane < kPanel; ++lane) {
            const int first = group * kGroup, count = rows[lane] ? std::min(kGroup, inputs_ - first) : 0;
            pack_group(count ? rows[lane] + first : nullptr, count, place, lane);
        }
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
    const Format format = panels().section(output / kPanel).format;
    const uint8_t* place = panel(output / kPanel);
    for (int group = 0; group < groups_; ++group, out += kGroup)
        if (format == Format::int8)
            read_group(place + static_cast<int64_t>(group) * kBlock, output % kPanel, out);
        else
            read_stored(format, place, group, output % kPanel, out);
}

}  // namespace outpace

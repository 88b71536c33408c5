#include "matrix.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <thread>

#include "formats.h"

namespace outpace {
namespace {

/// Calls f(number) for every number below `count`, on several threads.
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

/// Makes one section for each run of panels with one format.
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

Matrix::Matrix(const float* weights, const float* bias, int outputs, int inputs, int threads, WeightArena* arena)
    : outputs_(outputs), inputs_(inputs), groups_(round_up(inputs, kGroup) / kGroup) {
    pack(threads, arena, [&](int output, int group, float* out) {
        const int first = group * kGroup, count = std::min(kGroup, inputs - first);
        std::fill(std::copy_n(weights + static_cast<int64_t>(output) * inputs + first, count, out), out + kGroup, 0.0f);
    });
    set_bias(bias);
}

Matrix::Matrix(const Matrix& other, int threads, WeightArena* arena)
    : outputs_(other.outputs_), inputs_(other.inputs_), groups_(other.groups_), bias_(other.bias_) {
    pack(threads, arena, [&](int output, int group, float* out) { other.read(output, group, out); });
}

Matrix::Matrix(const Stored& stored, const float* bias, int threads, WeightArena* arena)
    : outputs_(stored.outputs), inputs_(stored.inputs), groups_(round_up(stored.inputs, kGroup) / kGroup) {
    stored.check();
    const Section whole{Format::q8_0, 0, outpace::panel_bytes(Format::q8_0, groups_), nullptr};
    allocate(stored.has_floats() ? std::vector<Section>{whole} : cut_sections(stored, groups_), arena);
    std::atomic<const char*> wrong{nullptr};
    share(threads, panels().count(), [&](int number) {
        if (const char* found = pack_panel(stored, panels().section(number).format, number, panel(number))) wrong = found;
    });
    if (wrong) throw std::domain_error(wrong);
    set_bias(bias);
}

/// Allocates all weights and rounds them to int8. `read` (output, group, out [kGroup]) returns them, zeros after the
/// last input.
template <class F>
void Matrix::pack(int threads, WeightArena* arena, F read) {
    allocate({{Format::q8_0, 0, outpace::panel_bytes(Format::q8_0, groups_), nullptr}}, arena);
    std::atomic<bool> is_finite{true}, fits{true};
    share(threads, panels().count(), [&](int number) {
        for (int group = 0; group < groups_; ++group)
            for (int lane = 0; lane < kPanel; ++lane) {
                float weights[kGroup] = {};
                if (number * kPanel + lane < outputs_) read(number * kPanel + lane, group, weights);
                if (!are_finite(weights, kGroup)) is_finite = false;
                if (!pack_floats(weights, panel(number), group, lane)) fits = false;
            }
    });
    if (!is_finite) throw std::domain_error("a weight is not finite");
    if (!fits) throw std::domain_error("a weight is too large for int8: above 8.3 million");
}

void Matrix::set_bias(const float* bias) {
    if (!bias) return;
    bias_.assign(bias, bias + outputs_);
    bias_.resize(round_up(outputs_, kPanel), 0.0f);
}

/// Allocates the panels of these sections, one after another.
void Matrix::allocate(std::vector<Section> sections, WeightArena* arena) {
    sections_ = std::move(sections);
    const uint8_t* place;
    if (arena) {
        auto [block, start] = arena->allocate(panel_bytes());
        block_ = std::move(block), place = start;
    } else {
        block_ = std::make_shared<const Block<uint8_t>>(panel_bytes());
        place = block_->data();
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

bool Matrix::takes_quarters() const {
    return std::all_of(sections_.begin(), sections_.end(), [](const Section& section) {
        return outpace::takes_quarters(section.format);
    });
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
    read_stored(panels().section(output / kPanel).format, panel(output / kPanel), group, output % kPanel, out);
}

}  // namespace outpace

#include "experts.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace outpace {
namespace {

void require(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

/// Pads the biases of each expert to whole panels.
std::vector<float> by_panels(const std::vector<float>& bias, int experts, int outputs) {
    if (bias.empty()) return {};
    require(bias.size() == static_cast<std::size_t>(experts) * outputs, "the experts' biases have the wrong size");
    const std::size_t stride = round_up(outputs, kPanel);
    std::vector<float> padded(experts * stride, 0.0f);
    for (int expert = 0; expert < experts; ++expert)
        std::copy_n(bias.data() + static_cast<std::size_t>(expert) * outputs, outputs, padded.data() + expert * stride);
    return padded;
}

}  // namespace

void Router::set_weights(const float* matrix) {
    weights = Block<float>(static_cast<std::size_t>(stride()) * inputs);
    float* to = weights.data();
    for (int vector = 0; vector < vectors(); ++vector)
        for (int input = 0; input < inputs; ++input)
            for (int row = vector * kLanes; row < (vector + 1) * kLanes; ++row)
                *to++ = row < rows() ? matrix[static_cast<int64_t>(row) * inputs + input] : 0.0f;
}

Experts::Experts(Router router, Source source, std::vector<float> gate_up_bias, std::vector<float> down_bias,
                 std::shared_ptr<WeightArena> arena)
    : router_(std::move(router)), source_(std::move(source)), arena_(std::move(arena)) {
    const int count = router_.experts;
    require(arena_ != nullptr, "experts need an arena");
    require(router_.used >= 1 && router_.used <= std::min(count, kUsedMax),
            std::to_string(router_.used) + " of " + std::to_string(count) + " experts cannot be used, at most " +
                std::to_string(kUsedMax));
    require(router_.bias.empty() || static_cast<int>(router_.bias.size()) == count, "the router's bias has the wrong size");
    require(router_.correction.empty() || static_cast<int>(router_.correction.size()) == count,
            "the router's correction has the wrong size");
    router_.bias.resize(router_.bias.empty() ? 0 : router_.stride(), 0.0f);
    for (int which = 0; which < 2; ++which) {
        std::vector<Stored>& all = which ? source_.down : source_.gate_up;
        const std::vector<int>& rows = which ? source_.down_rows : source_.gate_up_rows;
        require(static_cast<int>(all.size()) == count, std::to_string(all.size()) + " experts have weights, expected " +
                                                           std::to_string(count));
        for (Stored& one : all) {
            one.rows = rows.data(), one.outputs = static_cast<int>(rows.size());
            one.check();
            const bool is_same = one.inputs == all[0].inputs && std::all_of(one.parts.begin(), one.parts.end(), [&](auto& part) {
                return part.format == all[0].parts[0].format;
            });
            require(is_same, "the experts' matrices differ in format or size");
        }
        const Format format = all[0].parts[0].format;
        const bool rounds = is_float(format) || source_.is_rounded;
        const int groups = round_up(all[0].inputs, kGroup) / kGroup, outputs = static_cast<int>(rows.size());
        matrices_[which] = {rounds ? Format::q8_0 : format, outputs, groups, false,
                            by_panels(which ? down_bias : gate_up_bias, count, outputs)};
        matrices_[which].takes_quarters = outpace::takes_quarters(matrices_[which].format);
    }
    require(matrices_[0].outputs % (2 * kGroup) == 0, "the experts' width is no multiple of the group");
    require(matrices_[0].groups == round_up(router_.inputs, kGroup) / kGroup, "the experts' inputs are not the router's");
    require(matrices_[1].groups == width() / kGroup, "the experts' matrices do not fit one another");
    hold(count);
}

void Experts::hold(int count) {
    require(count >= 1 && count <= router_.experts, "the number of held experts is out of range");
    require(!source_.down.empty() || count == router_.experts, "experts without a source are all held");
    held_ = count;
    slots_.clear();
    slots_.reserve(count);
    slot_of_.assign(router_.experts, -1);
    num_packed_ = 0;
}

/// Returns the slot to fill next: a new one, or the least recently used.
int Experts::free_slot() {
    if (static_cast<int>(slots_.size()) < held_) {
        Slot slot{arena_->allocate(expert_bytes()), {}};
        const uint8_t* place = slot.place.start;
        for (int which = 0; which < 2; ++which) {
            slot.sections[which] = {matrices_[which].format, 0, matrices_[which].panel_bytes(), place};
            place += matrices_[which].bytes();
        }
        slots_.push_back(std::move(slot));
        return static_cast<int>(slots_.size()) - 1;
    }
    const auto by_use = [](const Slot& one, const Slot& other) { return one.used < other.used; };
    const int slot = static_cast<int>(std::min_element(slots_.begin(), slots_.end(), by_use) - slots_.begin());
    if (slots_[slot].expert >= 0) drop(slots_[slot].expert);
    return slot;
}

void Experts::drop(int expert) {
    if (slot_of_[expert] < 0) return;
    Slot& slot = slots_[slot_of_[expert]];
    slot.expert = slot_of_[expert] = -1;
    slot.used = 0;
    --num_packed_;
}

void Experts::plan(int rows, ExpertPlan& plan) {
    plan.experts.clear();
    plan.waves.clear();
    std::vector<int> places(router_.experts, 0);  // the number of an expert's pairs, then the next of them
    const int num_pairs = rows * router_.used;
    for (int pair = 0; pair < num_pairs; ++pair) ++places[plan.chosen[pair]];
    int first_pair = 0;
    for (const bool is_new : {false, true})
        for (int expert = 0; expert < router_.experts; ++expert) {
            if (!places[expert] || (slot_of_[expert] < 0) != is_new) continue;
            plan.experts.push_back({expert, slot_of_[expert], first_pair, places[expert], is_new});
            first_pair += std::exchange(places[expert], first_pair);
        }
    for (int pair = 0; pair < num_pairs; ++pair) {
        plan.pairs[pair] = places[plan.chosen[pair]]++;
        plan.pair_rows[plan.pairs[pair]] = pair / router_.used;
    }
    const int count = static_cast<int>(plan.experts.size());
    for (int first = 0; first < count; first += held_) {
        ExpertWave wave{first, std::min(held_, count - first), 0};
        ++clock_;
        for (int i = first; i < first + wave.count; ++i)
            if (!plan.experts[i].is_new) slots_[plan.experts[i].slot].used = clock_;
        for (int i = first; i < first + wave.count; ++i) {
            ChosenExpert& chosen = plan.experts[i];
            if (!chosen.is_new) continue;
            chosen.slot = free_slot();
            slots_[chosen.slot].expert = chosen.expert;
            slots_[chosen.slot].used = clock_;
            slot_of_[chosen.expert] = chosen.slot;
            ++num_packed_;
            ++wave.num_new;
        }
        plan.waves.push_back(wave);
    }
}

const char* Experts::pack(const ChosenExpert& chosen, int unit) {
    const int which = unit >= matrices_[0].panels(), panel = which ? unit - matrices_[0].panels() : unit;
    const Section& section = slots_[chosen.slot].sections[which];
    uint8_t* place = const_cast<uint8_t*>(Panels::blocks(section, panel));
    return pack_panel((which ? source_.down : source_.gate_up)[chosen.expert], section.format, panel, place);
}

void Experts::release(const ChosenExpert& chosen) const {
#ifdef MADV_DONTNEED
    if (!source_.is_mapped) return;
    constexpr std::size_t kPage = std::size_t{1} << 16;  // a multiple of every machine's pages
    for (const auto* matrix : {&source_.gate_up[chosen.expert], &source_.down[chosen.expert]})
        for (const StoredRows& part : matrix->parts) {
            const auto start = reinterpret_cast<std::uintptr_t>(part.data), size = static_cast<std::size_t>(part.rows * part.row_bytes);
            const auto first = (start + kPage - 1) / kPage * kPage, end = (start + size) / kPage * kPage;
            if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
        }
#else
    (void)chosen;
#endif
}

void Experts::pack_all() {
    ExpertPlan all;
    const int used = std::exchange(router_.used, 1);  // as if each of as many rows chose another expert
    for (int expert = 0; expert < router_.experts; ++expert) all.chosen.push_back(expert);
    all.pairs.resize(router_.experts);
    all.pair_rows.resize(router_.experts);
    plan(router_.experts, all);
    router_.used = used;
    for (const ChosenExpert& chosen : all.experts)
        for (int unit = 0; chosen.is_new && unit < units(); ++unit)
            if (const char* wrong = pack(chosen, unit)) throw std::domain_error(wrong);
}

Panels Experts::panels(const ChosenExpert& chosen, int which) const {
    const Shape& shape = matrices_[which];
    const int64_t stride = round_up(shape.outputs, kPanel);
    return {&slots_[chosen.slot].sections[which], 1, shape.bias.empty() ? nullptr : shape.bias.data() + chosen.expert * stride,
            shape.outputs, shape.groups};
}

}  // namespace outpace

// A pass through a layer's experts.
#include <algorithm>
#include <climits>
#include <new>
#include <stdexcept>

#include "pass.h"

namespace outpace {
namespace {

/// Units of a product with several experts: each part of the panels goes through all experts, so that a thread has the
/// same outputs of every expert.
struct Slices {
    int experts, panels, parts;

    int units() const { return experts * panels; }
    int start(int part) const { return panels * part / parts; }

    struct Place {
        int expert, panel, first, end;  // first, end: the part's panels
    };
    Place at(int unit) const {
        int part = 0;
        while (experts * start(part + 1) <= unit) ++part;
        const int first = start(part), end = start(part + 1), within = unit - experts * first;
        return {within / (end - first), first + within % (end - first), first, end};
    }
};

/// Copies a row of activations.
void copy_row(const Activations& from, int row, const Activations& to, int to_row) {
    for (int group = 0; group < from.groups; ++group) {
        const Activations source = from.from(row, group), place = to.from(to_row, group);
        std::copy_n(source.values, kGroup, place.values);
        *place.facts = *source.facts;
    }
}

/// The rows of activations from `row` on.
Activations rows_from(Activations all, int row) {
    all.values += static_cast<int64_t>(row) * kGroup, all.facts += row;
    return all;
}

}  // namespace

/// Makes space for what the layers with experts compute.
void Model::Pass::plan_experts() {
    const std::size_t rows = forest_.rows;
    std::size_t scores = 0, pairs = 0, gated = 0, shared = 0;
    scratch_.plans.resize(model_.num_layers());
    scratch_.damage.clear();
    for (int number = 0; number < model_.num_layers(); ++number) {
        const Layer& layer = *model_.layers_[number];
        ExpertPlan& plan = scratch_.plans[number];
        plan.experts.clear();
        plan.has_failed = false;
        if (!layer.experts) continue;
        const Router& router = layer.experts->router();
        plan.chosen.resize(rows * router.used);
        plan.weights.resize(rows * router.shares());
        plan.pairs.resize(rows * router.used);
        plan.pair_rows.resize(rows * router.used);
        scores = std::max(scores, rows * router.stride());
        pairs = std::max(pairs, rows * router.used);
        gated = std::max(gated, rows * router.used * layer.experts->width());
        if (layer.shared()) shared = std::max(shared, rows * layer.gate_up->outputs() / 2);
        const int held = layer.experts->held(), most = std::min<int>(router.experts, rows * router.used);
        num_waves_ += 3 * ((most + held - 1) / held);
    }
    scratch_.normed.reserve(rows * stride_);
    scratch_.expert_scores.reserve(scores);
    scratch_.expert_outputs.reserve(pairs * stride_);
    scratch_.expert_inputs.view(1, static_cast<int>(pairs * stride_ / kGroup));
    scratch_.expert_gated.view(1, static_cast<int>(gated / kGroup));
    scratch_.shared_gated.view(1, static_cast<int>(shared / kGroup));
    if (shared) scratch_.shared_outputs.reserve(rows * stride_);
}

/// Runs a layer's experts.
void Model::Pass::run_experts(int number, Team::Member& member) {
    const Layer& layer = *model_.layers_[number];
    Experts& experts = *layer.experts;
    const Router& router = experts.router();
    ExpertPlan& plan = scratch_.plans[number];
    const int rows = num_rows_after(number);
    Activations in = normalized_;
    in.by_quarters = experts.takes_quarters(0) && (!layer.shared() || layer.gate_up->takes_quarters());
    const BranchNorms* norms = layer.branch_norms.get();
    if (norms) {
        Activations gated = gated_;
        gated.groups = layer.gate_up->outputs() / 2 / kGroup;
        gate(layer, number, rows, gated, member);
        multiply(number, *layer.down, start_after(number, member), gated, rows, scratch_.branch.data(), stride_, false, member);
    }
    normalize(norms ? norms->router : layer.mlp_norm, in, nullptr, rows, member, scratch_.normed.data());
    if (norms) normalize(norms->experts, in, nullptr, rows, member);
    const ScoreExperts scoring{router, scratch_.normed.data(), stride_, rows, scratch_.expert_scores.data()};
    team_.share(member, router.vectors(), [&](int vector) { kernels_.score_experts(scoring, vector); });
    const ChooseExperts choice{router, scratch_.expert_scores.data(), plan.chosen.data(), plan.weights.data()};
    team_.share(member, rows, [&](int row) { kernels_.choose_experts(choice, row); });
    team_.share(member, 1, [&](int) {
        try {
            experts.plan(rows, plan);
        } catch (const std::bad_alloc&) {
            plan.experts.clear(), plan.waves.clear(), plan.has_failed = true;
        }
    });
    for (const ExpertWave& wave : plan.waves) run_wave(number, wave, wave.first == 0, member);
    const bool has_norm = !layer.mlp_output_norm.empty();
    const MixExperts mix{router.used, scratch_.expert_outputs.data(), plan.pairs.data(),
                         layer.shared() ? scratch_.shared_outputs.data() : nullptr, plan.weights.data(),
                         model_.shape_.hidden, stride_, norms ? scratch_.normed.data() : has_norm ? scratch_.branch.data() : scratch_.x.data(), !has_norm};
    team_.share(member, rows * mix.units_a_row(), [&](int unit) { kernels_.mix_experts(mix, unit); });
    if (!has_norm) return;
    const AddNormed task{scratch_.x.data(), scratch_.branch.data(), layer.mlp_output_norm.data(), model_.shape_.hidden,
                         stride_, model_.shape_.epsilon, layer.embedding ? 1.0f : layer.scale};
    team_.share(member, rows, [&](int row) {
        if (norms) {
            const float epsilon = model_.shape_.epsilon;
            const int size = model_.shape_.hidden;
            kernels_.norm_rows({scratch_.branch.data(), stride_, norms->mlp_output.data(), size, epsilon}, row);
            kernels_.add_normed({scratch_.branch.data(), scratch_.normed.data(), norms->experts_output.data(), size, stride_, epsilon}, row);
        }
        kernels_.add_normed(task, row);
    });
}

/// Runs some of a layer's experts; the first wave also runs the shared one.
void Model::Pass::run_wave(int number, const ExpertWave& wave, bool is_first, Team::Member& member) {
    const Layer& layer = *model_.layers_[number];
    Experts& experts = *layer.experts;
    const ExpertPlan& plan = scratch_.plans[number];
    const ChosenExpert* chosen = plan.experts.data() + wave.first;
    const int rows = num_rows_after(number), pairs = rows * experts.router().used;
    const bool is_on = forest_.rows > FetchTrial::kFewRows || model_.trial_.prefetches(number);
    Activations in = normalized_, inputs = scratch_.expert_inputs.view(pairs, stride_ / kGroup);
    in.by_quarters = inputs.by_quarters = experts.takes_quarters(0) && (!layer.shared() || layer.gate_up->takes_quarters());
    Activations gated = scratch_.expert_gated.view(pairs, experts.width() / kGroup);
    gated.by_quarters = experts.takes_quarters(1);

    const int packing = wave.num_new * experts.units();
    team_.share(member, packing + (is_first ? pairs : 0), [&](int unit) {
        if (unit >= packing) return copy_row(in, plan.pair_rows[unit - packing], inputs, unit - packing);
        const ChosenExpert& one = chosen[wave.count - wave.num_new + unit / experts.units()];
        if (const char* damage = experts.pack(one, unit % experts.units())) {
            const std::lock_guard<std::mutex> alone(scratch_.finding);
            const std::string where = "expert " + std::to_string(one.expert) + " of layer " + std::to_string(number);
            if (scratch_.damage.empty()) scratch_.damage = where + ": " + damage;
        }
    });

    const Matrix* shared = is_first ? layer.shared() : nullptr;
    const Prefetch beside{INT_MAX, nullptr, is_on};  // the shared expert's
    const int shared_groups = shared ? shared->outputs() / 2 / kGroup : 0;
    const Activations shared_gated = shared ? in_form_for(*layer.down, scratch_.shared_gated.view(rows, shared_groups)) : gated;
    const Gating gating = model_.shape_.gating;
    const float limit = model_.shape_.gate_limit;
    // Multiplies by the next expert's weights, or those at `after`, in the members' part of the panels.
    const auto prefetch = [&](const Slices::Place& place, int which, int panels_a_unit, const uint8_t* after) {
        const bool is_last = place.expert + 1 == wave.count;
        const Panels next = experts.panels(chosen[is_last ? place.expert : place.expert + 1], which);
        const uint8_t* start = Panels::blocks(next.section(0), place.first * panels_a_unit);
        return Prefetch{place.end, is_last ? after : start, is_on};
    };
    const Slices groups{wave.count, experts.width() / kGroup, team_.size()};
    constexpr int kPanels = kGroup / kLanes;  // of a unit of a gated product
    team_.share(member, groups.units() + shared_groups + wave.num_new, [&](int unit) {
        if (unit >= groups.units() + shared_groups)
            return experts.release(chosen[wave.count - 1 - (unit - groups.units() - shared_groups)]);
        if (unit >= groups.units()) {
            const GatedProduct task{shared->panels(), beside, in, rows, shared_gated, nullptr, 0, gating, limit};
            return kernels_.gated_product(task, unit - groups.units());
        }
        const Slices::Place place = groups.at(unit);
        const ChosenExpert& one = chosen[place.expert];
        const Panels down = experts.panels(chosen[0], 1);
        const uint8_t* after = Panels::blocks(down.section(0), team_.first_unit(member.number, down.count()));
        const GatedProduct task{experts.panels(one, 0), prefetch(place, 0, kPanels, after), rows_from(inputs, one.first_pair),
                                one.num_pairs, rows_from(gated, one.first_pair), nullptr, 0, gating, limit};
        kernels_.gated_product(task, place.panel);
    });

    const int panels = round_up(model_.shape_.hidden, kPanel) / kPanel;
    const Slices slices{wave.count, panels, team_.size()};
    const uint8_t* after = start_after(number, member);
    team_.share(member, slices.units() + (shared ? panels : 0), [&](int unit) {
        if (unit >= slices.units()) {
            const Product task{layer.down->panels(), beside, shared_gated, rows, scratch_.shared_outputs.data(), stride_, false};
            return kernels_.product(task, unit - slices.units());
        }
        const Slices::Place place = slices.at(unit);
        const ChosenExpert& one = chosen[place.expert];
        const Product task{experts.panels(one, 1), prefetch(place, 1, 1, after), rows_from(gated, one.first_pair), one.num_pairs,
                           scratch_.expert_outputs.data() + static_cast<int64_t>(one.first_pair) * stride_, stride_, false};
        kernels_.product(task, place.panel);
    });
}

void Model::Pass::end_experts() {
    int layers = 0, experts = 0;
    bool has_failed = false;
    for (int number = 0; number < model_.num_layers(); ++number) {
        if (!model_.layers_[number]->experts) continue;
        const ExpertPlan& plan = scratch_.plans[number];
        layers += !plan.experts.empty();
        experts += static_cast<int>(plan.experts.size());
        has_failed |= plan.has_failed;
        for (const ChosenExpert& one : plan.experts)
            if (one.is_new && !scratch_.damage.empty()) model_.layers_[number]->experts->drop(one.expert);
    }
    model_.mean_experts_ = layers ? static_cast<float>(experts) / static_cast<float>(layers) : 0.0f;
    if (has_failed) throw std::bad_alloc();
    if (!scratch_.damage.empty()) throw std::domain_error(scratch_.damage);
}

}  // namespace outpace

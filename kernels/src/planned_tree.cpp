#include "planned_tree.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace outpace {
namespace {

// The same constants as in outpace/planning, drafters/model.py and core/multi_step.py.
constexpr double kLittle = 0.5, kHope = 0.4;
constexpr int kBeam = 4;
constexpr int kUnknown = 2;
constexpr int kFirst = 4;
constexpr int kChildren = 2;
constexpr double kLeastCoverage = 0.05;
constexpr double kOn = 0.97;  // planning/acceptance.py

/// Returns the number of rows that may be tried in addition to the root.
int most_more(const PassTimes& times, int others) { return std::max(kFirst, 2 * times.widest - others - 1); }

}  // namespace

std::vector<double> log_chances(const ChoiceFit& fit, const std::vector<double>& values, int count) {
    double shares = 0.0, total = 0.0;
    std::vector<double> logs;
    for (double value : values) {
        shares += std::exp(value);
        logs.push_back((value - values[0]) / fit.temperature);
        total += std::exp(logs.back());
    }
    const double of_shares = std::max(kLeastCoverage, 1.0 - fit.open * std::max(0.0, 1.0 - shares));
    const double coverage = fit.open < 0.0 ? fit.coverage : of_shares;
    const double shift = std::log(coverage / total);
    if (static_cast<int>(logs.size()) > count) logs.resize(count);
    for (double& value : logs) value += shift;
    return logs;
}

BestRows best_rows(const std::vector<double>& falling, const PassTimes& times, int others, double price) {
    const int known = static_cast<int>(times.seconds.size());
    const int most = std::min({most_more(times, others), static_cast<int>(falling.size()), known - others - 1});
    BestRows best{1, 0.0};
    double gain = 0.0;
    for (int count = 1; count <= most; ++count) {
        gain += falling[count - 1];
        const double worth = gain - price * (times.seconds[others + count] - times.seconds[others]);
        if (worth > best.worth) best = {count + 1, worth};
    }
    return best;
}

PlannedTree::PlannedTree(const Plan& plan, const Growing& growing, std::vector<int> tokens, std::vector<int> parents,
                         std::vector<double> scores, std::vector<double> chances)
    : plan_(plan),
      growing_(growing),
      tokens_(std::move(tokens)),
      parents_(std::move(parents)),
      depths_(tokens_.size(), 0),
      slots_(tokens_.size(), -1),
      scores_(std::move(scores)),
      chances_(std::move(chances)),
      children_(tokens_.size()),
      first_(static_cast<int>(tokens_.size())),
      copied_end_(first_),
      copied_(plan.copied) {
    for (int node = 1; node < size(); ++node) {
        depths_[node] = depths_[parents_[node]] + 1;
        children_[parents_[node]].push_back(node);
    }
}

int PlannedTree::child(int node, int64_t token) const {
    for (int child : children_[node])
        if (tokens_[child] == token) return child;
    return -1;
}

int PlannedTree::add(int parent, int token, double score, double own) {
    children_[parent].push_back(size());
    children_.emplace_back();
    tokens_.push_back(token);
    parents_.push_back(parent);
    depths_.push_back(depths_[parent] + 1);
    slots_.push_back(-1);
    scores_.push_back(score);
    chances_.push_back(std::min(own, chances_[parent]));
    return size() - 1;
}

int PlannedTree::copy(int parent, int token, double score) {
    const int node = add(parent, token, score, chances_[parent] * std::exp(score - scores_[parent]) * kOn);
    copied_end_ = size();
    return node;
}

void PlannedTree::finish_copies() {
    copied_ = 0.0;
    for (int child : children_[0]) copied_ += chances_[child];
}

bool PlannedTree::is_due(std::size_t layer) const {
    const bool is_told = layer == 0 || copied_ <= kLittle;  // with copies a deeper layer says nothing
    return is_told && layer < plan_.due.size() && plan_.due[layer];
}

bool PlannedTree::pays() {
    const std::size_t layer = grown_.size();
    const int deepest = plan_.cost > 0.0 ? plan_.deepest : std::min(plan_.deepest, kUnknown);
    if (is_trial_ || static_cast<int>(layer) >= deepest || plan_.growth.empty()) return false;
    at_leaves_ = reach();
    const double growth = plan_.growth[std::min(layer, plan_.growth.size() - 1)];
    if (growth * at_leaves_ > plan_.cost || (layer == 0 && plan_.explores > 0 && plan_.trust * (1.0 - copied_) > kHope)) return true;
    is_trial_ = is_due(layer);
    return is_trial_;
}

/// Probability that the walk reaches the next layer, less the price of a row there.
double PlannedTree::reach() const {
    std::vector<double> leaves;
    for (int node = 1; node < size(); ++node)
        if (children_[node].empty()) leaves.push_back(chances_[node]);
    std::sort(leaves.begin(), leaves.end(), std::greater<>());
    if (leaves.size() > kBeam) leaves.resize(kBeam);
    if (grown_.empty()) {
        double beside = 0.0;
        for (int child : children_[0]) beside += chances_[child];
        leaves.push_back(plan_.trust * (1.0 - beside));
    }
    double total = 0.0;
    for (double chance : leaves) total += chance_at_leaf(chance);
    return total;
}

std::vector<int> PlannedTree::frontier(int most_depth) const {
    std::vector<int> open;
    if (size() >= growing_.tree_nodes) return open;
    for (int node = 0; node < size(); ++node)
        if (slots_[node] < 0 && scores_[node] >= growing_.floor && depths_[node] <= most_depth) open.push_back(node);
    std::stable_sort(open.begin(), open.end(), [&](int a, int b) { return scores_[a] > scores_[b]; });
    if (static_cast<int>(open.size()) > growing_.width) open.resize(growing_.width);
    std::sort(open.begin(), open.end());
    return open;
}

int PlannedTree::hang(const std::vector<int>& frontier, const std::vector<Proposals>& proposals) {
    struct Child {
        double score;
        int parent, token;
    };
    std::vector<Child> children;
    for (std::size_t n = 0; n < frontier.size(); ++n) {
        const int node = frontier[n];
        if (proposals[n].tokens.empty()) continue;
        const std::vector<double> logs = log_chances(plan_.fit, proposals[n].values, growing_.width);
        for (std::size_t number = 0; number < logs.size(); ++number) {
            const double score = scores_[node] + logs[number];
            if (score < plan_.least && number) break;
            children.push_back({score, node, static_cast<int>(proposals[n].tokens[number])});
        }
    }
    if (frontier.size() > 1)
        std::stable_sort(children.begin(), children.end(),
                         [](const Child& a, const Child& b) { return a.score > b.score; });
    const int before = size(), room = growing_.tree_nodes - before;
    const int most = std::min(room, std::max(kChildren * growing_.width, room));
    if (static_cast<int>(children.size()) > most) children.resize(most);
    for (const Child& one : children) {
        if (child(one.parent, one.token) >= 0) continue;
        const double score = std::min(one.score, scores_[one.parent]);
        add(one.parent, one.token, score, std::exp(score) * plan_.trust);
    }
    return size() - before;
}

/// Probabilities of all nodes except the root, descending, as many as may be verified.
std::vector<double> PlannedTree::falling_chances() const {
    std::vector<double> falling(chances_.begin() + 1, chances_.end());
    std::sort(falling.begin(), falling.end(), std::greater<>());
    if (static_cast<int>(falling.size()) > plan_.budget - 1) falling.resize(plan_.budget - 1);
    return falling;
}

void PlannedTree::finish_layer(const PassTimes& times, int others) {
    Grown grown{0.0, at_leaves_, false};
    if (copied_ <= kLittle) {  // with copies a layer adds what they leave
        const std::vector<double> falling = falling_chances();
        const BestRows best = best_rows(falling, times, others, plan_.price);
        const bool is_cut = size() - 1 >= best.rows && best.rows > most_more(times, others);
        grown.worth = best.worth - worth_;
        grown.counts = !is_cut;
        worth_ = best.worth;
    }
    grown_.push_back(grown);
}

std::vector<int> PlannedTree::choose(const PassTimes& times, int others, bool wanted, bool& fewer) const {
    std::vector<int> order(size() - 1);
    std::iota(order.begin(), order.end(), 1);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return chances_[a] > chances_[b]; });
    if (static_cast<int>(order.size()) > plan_.budget - 1) order.resize(plan_.budget - 1);
    fewer = false;
    int rows = 2;
    if (!(is_trial_ && grown_.size() == 1)) {
        rows = best_rows(falling_chances(), times, others, plan_.price).rows;
        const std::size_t half = (rows + 1) / 2, all = others + half;
        fewer = wanted && rows > 1 && all <= times.untimed.size() && times.untimed[all - 1];
        if (fewer) rows = static_cast<int>(half);
    }
    if (static_cast<int>(order.size()) > rows - 1) order.resize(rows - 1);
    order.insert(order.begin(), 0);
    std::sort(order.begin(), order.end());
    return order;
}

}  // namespace outpace

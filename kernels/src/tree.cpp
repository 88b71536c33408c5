#include "tree.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <stdexcept>

namespace outpace {
namespace {

constexpr double kMinCoverage = 0.05;  // lowest assumed probability that any proposal is picked
constexpr double kTemperatures[] = {0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0};
constexpr double kDoubt = 4.0;  // prior: nats by which a temperature e times higher or lower must explain picks better
constexpr double kMemory = 0.995;  // decay per pick, so about 200 picks count
const char* const kKinds[] = {"picked", "picked", "drawn", "without_replacement"};

[[noreturn]] void refuse(const std::string& reason) { throw std::invalid_argument(reason); }

/// Returns the probability that these log probabilities leave to all other tokens.
double left_open(const std::vector<double>& values) {
    double sum = 0.0;
    for (const double value : values) sum += std::exp(value);
    return std::max(0.0, 1.0 - sum);
}

}  // namespace

TokenTree::TokenTree(int token, int64_t root_id, int64_t next) : next_id(next) {
    append(kPrefix, token, 0.0, kPrimary, root_id);
    next_id = next;
}

void TokenTree::append(int parent, int token, double score, int role, int64_t id) {
    if (token < 0 || token >= vocab_size)
        refuse("token " + std::to_string(token) + " is not in a vocabulary of " + std::to_string(vocab_size));
    const int node = size();
    tokens.push_back(token);
    parents.push_back(parent);
    depths.push_back(parent == kPrefix ? 0 : depths[parent] + 1);
    scores.push_back(std::isnan(score) ? -std::numeric_limits<double>::infinity() : score);  // sorting needs an order
    roles.push_back(static_cast<uint8_t>(role));
    is_sorted_ = is_sorted_ && (ids.empty() || ids.back() < id);
    ids.push_back(id);
    sources.push_back(parent == kPrefix ? 0 : current_source);
    kinds_.push_back(kUnset);
    first_child_.push_back(-1);
    last_child_.push_back(-1);
    next_sibling_.push_back(-1);
    next_id = std::max(next_id, id + 1);
    if (parent == kPrefix) return;
    if (last_child_[parent] >= 0) next_sibling_[last_child_[parent]] = node;
    else first_child_[parent] = node;
    last_child_[parent] = node;
}

void TokenTree::check(int node) const {
    if (node < 0 || node >= size())
        refuse("node " + std::to_string(node) + " is not in a tree of " + std::to_string(size()) + " nodes");
}

void TokenTree::check_parent(int parent) const {
    if (parent < 0 || parent >= size())
        refuse("parent " + std::to_string(parent) + " is not in a tree of " + std::to_string(size()) + " nodes");
}

void TokenTree::declare(int node, int kind) {
    check_parent(node);
    if (kind < kPicked || kind > kWithoutReplacement) refuse(std::to_string(kind) + " is no kind of siblings");
    if (kinds_[node] != kUnset && kinds_[node] != kind)
        refuse("children of node " + std::to_string(node) + " are " + kKinds[kinds_[node]] + ", not " + kKinds[kind]);
    kinds_[node] = static_cast<uint8_t>(kind);
}

int TokenTree::add(int parent, int token, double score, int role, int kind, int64_t id) {
    check_parent(parent);
    if (std::isnan(score)) refuse("the path score of token " + std::to_string(token) + " is not a number");
    if (role < kPrimary || role > kProbe) refuse(std::to_string(role) + " is no role");
    declare(parent, kind);
    if (kind == kPicked && child(parent, token) >= 0) return kPrefix;
    append(parent, token, std::min(score, scores[parent]), role, id);
    return size() - 1;
}

void TokenTree::attach_children(const std::vector<Child>& children, int primary) {
    std::vector<std::pair<Child, int>> fresh;
    fresh.reserve(children.size());
    for (const Child& node : children) {
        check_parent(node.parent);
        if (std::isnan(node.score))
            refuse("the path score of token " + std::to_string(node.token) + " is not a number");
        declare(node.parent, kPicked);
        const int role = primary-- > 0 ? kPrimary : kSecondary;
        if (child(node.parent, node.token) < 0)
            fresh.push_back({{std::min(node.score, scores[node.parent]), node.parent, node.token}, role});
    }
    double lowest = -std::numeric_limits<double>::infinity();
    if (max_nodes >= 0 && size() + static_cast<int>(fresh.size()) > max_nodes) {
        std::vector<double> more;
        for (const auto& [node, role] : fresh) more.push_back(node.score);
        lowest = bound(more);
    }
    for (const auto& [node, role] : fresh)
        if (node.score >= lowest) append(node.parent, node.token, node.score, role, next_id);
}

void TokenTree::confirm(int parent, int token, double chance) {
    const int node = child(parent, token);
    if (node < 0) return;
    const double score = scores[parent] + std::min(chance, 0.0);
    ++num_confirmed;
    if (!(score > scores[node])) return;
    sources[node] = current_source;
    const double more = std::isfinite(scores[node]) ? score - scores[node] : 0.0;
    for (const int below : subtree(node))
        scores[below] = below == node ? score : std::min(scores[below] + more, scores[parents[below]]);
}

int TokenTree::attach_offers(const std::vector<int>& frontier, const ProposalRows& offers, const PickModel& picks,
                             int width, int max_children) {
    if (static_cast<int>(frontier.size()) != offers.count) refuse("every node needs its proposals");
    const int confirmed = num_confirmed;
    std::vector<std::vector<double>> chances;
    std::vector<std::pair<double, int>> heads;  // (-score of the best child not taken yet, row): a heap, best on top
    for (int row = 0; row < offers.count; ++row) {
        check_parent(frontier[row]);
        const Proposals& proposals = offers.at(row);
        if (proposals.values.size() != proposals.tokens.size()) refuse("every proposal needs a value");
        for (const int64_t token : proposals.tokens)
            if (token < 0 || token > std::numeric_limits<int>::max())
                refuse("no token has the id " + std::to_string(token));
        chances.push_back(picks.log_chances(proposals.values, width));
        if (first_child_[frontier[row]] >= 0)
            for (std::size_t rank = 0; rank < chances[row].size(); ++rank)
                confirm(frontier[row], static_cast<int>(proposals.tokens[rank]), chances[row][rank]);
    }
    for (int row = 0; row < offers.count; ++row) {
        if (!chances[row].empty()) heads.emplace_back(-(scores[frontier[row]] + chances[row][0]), row);
    }
    std::make_heap(heads.begin(), heads.end(), std::greater<>());
    std::vector<std::size_t> taken(offers.count, 0);
    std::vector<Child> best;
    while (!heads.empty() && static_cast<int>(best.size()) < max_children) {
        std::pop_heap(heads.begin(), heads.end(), std::greater<>());
        const auto [score, row] = heads.back();
        heads.pop_back();
        const int node = frontier[row];
        best.push_back({-score, node, static_cast<int>(offers.at(row).tokens[taken[row]])});
        if (++taken[row] == chances[row].size()) continue;
        heads.emplace_back(-(scores[node] + chances[row][taken[row]]), row);
        std::push_heap(heads.begin(), heads.end(), std::greater<>());
    }
    const int before = size();
    attach_children(best, width);
    return size() - before + num_confirmed - confirmed;
}

int TokenTree::chain(int parent, const std::vector<int>& new_tokens, const std::vector<double>& new_scores) {
    if (new_tokens.size() != new_scores.size()) refuse("every token needs a path score");
    const int first = size();
    declare(parent, kPicked);
    for (std::size_t n = 0; n < new_tokens.size(); ++n) {
        const int above = n ? size() - 1 : parent;
        if (n) kinds_[above] = kPicked;
        append(above, new_tokens[n], new_scores[n], kPrimary, next_id);
    }
    return first;
}

int TokenTree::child(int node, int token) const {
    check(node);
    for (int candidate = first_child_[node]; candidate >= 0; candidate = next_sibling_[candidate])
        if (tokens[candidate] == token && roles[candidate] != kProbe) return candidate;
    return kPrefix;
}

std::vector<int> TokenTree::children(int node) const {
    check(node);
    std::vector<int> found;
    for (int candidate = first_child_[node]; candidate >= 0; candidate = next_sibling_[candidate]) found.push_back(candidate);
    return found;
}

std::vector<int> TokenTree::leaves() const {
    std::vector<int> found;
    for (int node = 1; node < size(); ++node)
        if (first_child_[node] < 0 && roles[node] != kProbe) found.push_back(node);
    return found;
}

std::vector<int> TokenTree::path(int node) const {
    check(node);
    std::vector<int> nodes;
    for (; node != kPrefix; node = parents[node]) nodes.push_back(node);
    std::reverse(nodes.begin(), nodes.end());
    return nodes;
}

std::vector<int> TokenTree::path_tokens(int node) const {
    check(node);
    std::vector<int> found;
    for (; node > 0; node = parents[node]) found.push_back(tokens[node]);
    std::reverse(found.begin(), found.end());
    return found;
}

int TokenTree::deepest() const { return *std::max_element(depths.begin(), depths.end()); }

int TokenTree::find(int64_t id) const {
    if (!is_sorted_) {
        const auto place = std::find(ids.begin(), ids.end(), id);
        return place == ids.end() ? kPrefix : static_cast<int>(place - ids.begin());
    }
    const auto place = std::lower_bound(ids.begin(), ids.end(), id);
    return place == ids.end() || *place != id ? kPrefix : static_cast<int>(place - ids.begin());
}

bool TokenTree::is_chain() const {
    for (int node = 0; node < size(); ++node)
        if (parents[node] != node - 1) return false;
    return true;
}

std::vector<int> TokenTree::best(int count) const {
    std::vector<int> nodes(size());
    std::iota(nodes.begin(), nodes.end(), 0);
    if (count >= size()) return nodes;
    count = std::max(count, 0);
    if (!is_chain()) {
        if (std::any_of(kinds_.begin(), kinds_.end(), [](uint8_t kind) { return kind > kPicked; }))
            refuse("only trees of picked siblings may be pruned by score");
        const auto is_better = [&](int a, int b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; };
        std::nth_element(nodes.begin(), nodes.begin() + count, nodes.end(), is_better);
        std::sort(nodes.begin(), nodes.begin() + count);
    }
    nodes.resize(count);
    return nodes;
}

std::vector<double> TokenTree::best_scores(int count, bool leaves) const {
    std::vector<double> found;
    for (int node = leaves ? 0 : 1; node < size(); ++node)
        if (!leaves || first_child_[node] < 0) found.push_back(scores[node]);
    const auto end = found.begin() + std::clamp<std::ptrdiff_t>(count, 0, found.size());
    std::partial_sort(found.begin(), end, found.end(), std::greater<>());
    found.erase(end, found.end());
    return found;
}

int TokenTree::best_width(int max_leaves, double fixed, double per_node) const {
    double total = 0.0;
    int count = 0;
    for (const double score : best_scores(max_leaves, true)) {
        const double chance = std::exp(score);
        if (count && chance * (fixed + per_node * count) < per_node * total) break;
        total += chance;
        ++count;
    }
    return count;
}

std::vector<double> TokenTree::chances(const std::vector<std::pair<int, double>>& factors, double other) const {
    std::vector<double> found(size(), 1.0);
    for (int node = 1; node < size(); ++node) {
        double factor = other;
        for (const auto& [source, value] : factors)
            if (source == sources[node]) factor = value;
        const int parent = parents[node];
        found[node] = found[parent] * std::min(std::exp(scores[node] - scores[parent]) * factor, 1.0);
    }
    return found;
}

std::vector<double> TokenTree::parent_chances(const std::vector<double>& chances, int source, int last_lookup_node,
                                              double factor, bool with_root) const {
    if (chances.size() != tokens.size() || last_lookup_node < 0 || last_lookup_node >= size())
        throw std::invalid_argument("every node needs a chance, and nodes that were looked up must be in the tree");
    std::vector<double> found;
    for (const int leaf : leaves()) found.push_back(chances[leaf]);
    for (int node = 0; node <= last_lookup_node; ++node) {
        double rest = chances[node];
        bool is_expanded = false;
        for (int child = first_child_[node]; child >= 0; child = next_sibling_[child]) {
            rest -= chances[child];
            is_expanded = is_expanded || sources[child] == source;
        }
        if (!is_expanded && (node ? first_child_[node] >= 0 : with_root)) found.push_back(factor * rest);
    }
    return found;
}

std::vector<int> TokenTree::subtree(int node) const {
    check(node);
    std::vector<char> is_inside(size(), 0);
    std::vector<int> found{node};
    is_inside[node] = 1;
    for (int other = node + 1; other < size(); ++other)
        if (is_inside[parents[other]]) {
            is_inside[other] = 1;
            found.push_back(other);
        }
    return found;
}

double TokenTree::bound(const std::vector<double>& more) const {
    if (std::any_of(more.begin(), more.end(), [](double score) { return std::isnan(score); }))
        refuse("a path score is not a number");
    if (max_nodes < 1 || is_drawn || size() + static_cast<int>(more.size()) <= max_nodes)
        return -std::numeric_limits<double>::infinity();
    std::vector<double> all(scores);
    all.insert(all.end(), more.begin(), more.end());
    std::nth_element(all.begin(), all.begin() + (max_nodes - 1), all.end(), std::greater<>());
    return all[max_nodes - 1];
}

std::pair<std::vector<int>, std::optional<int64_t>> TokenTree::follow(
    int count, const std::function<int64_t(int)>& pick) const {
    std::vector<int> nodes{0};
    while (nodes.back() < count) {
        const int node = nodes.back();
        check(node);  // the last pick may have changed the tree
        if (kinds_[node] > kPicked)
            refuse("this rule is exact for picked siblings only, node " + std::to_string(node) + " has " +
                   kKinds[kinds_[node]]);
        const int64_t token = pick(node);
        const int below = static_cast<int>(token) == token ? child(node, static_cast<int>(token)) : kPrefix;
        if (below < 0) return {std::move(nodes), token};
        nodes.push_back(below);
    }
    return {std::move(nodes), std::nullopt};
}

void TokenTree::take(const TokenTree& other, const std::vector<int>& nodes) {
    if (nodes.empty()) refuse("a tree needs a root");
    for (const int node : nodes) other.check(node);
    std::vector<int> places(other.size(), -1);
    TokenTree tree(other.tokens[nodes[0]], other.ids[nodes[0]], other.next_id);
    places[nodes[0]] = 0;
    const double base = other.scores[nodes[0]];
    for (std::size_t n = 1; n < nodes.size(); ++n) {
        const int node = nodes[n], above = node ? places[other.parents[node]] : -1;
        if (above < 0) refuse("node " + std::to_string(node) + " has no parent among the nodes");
        tree.current_source = other.sources[node];
        tree.append(above, other.tokens[node], other.scores[node] - base, other.roles[node], other.ids[node]);
        tree.kinds_[above] = other.kinds_[other.parents[node]];
        places[node] = static_cast<int>(n);
    }
    tree.next_id = other.next_id;
    tree.current_source = 0;
    tree.vocab_size = other.vocab_size;
    *this = std::move(tree);
}

void TokenTree::adopt(const TokenTree& other, int first, bool is_secondary_visible) {
    const int known = size(), end = other.size();
    for (int node = std::max(first, 1); node < end; ++node) {
        if (!is_secondary_visible && other.roles[node] == kSecondary && !other.has_children(node)) continue;
        const int parent = find(other.ids[other.parents[node]]);
        if (parent >= 0 && parent < known)
            add(parent, other.tokens[node], other.scores[node], other.roles[node], kPicked, other.ids[node]);
    }
}

Delta TokenTree::delta(int first) const {
    Delta found;
    for (int node = std::max(first, 1); node < size(); ++node) {
        const int parent = parents[node];
        found.ids.push_back(ids[node]);
        found.parents.push_back(ids[parent]);
        found.tokens.push_back(tokens[node]);
        found.roles.push_back(roles[node]);
        found.log_probs.push_back(scores[node] - scores[parent]);
    }
    return found;
}

std::pair<int, int> TokenTree::insert(const Delta& delta) {
    int added = 0, orphans = 0;
    const int known = size();  // the nodes of one delta are distinct, so only older siblings are compared
    for (std::size_t n = 0; n < delta.ids.size(); ++n) {
        const int parent = find(delta.parents[n]);
        if (parent < 0) {
            ++orphans;
            continue;
        }
        const double score = scores[parent] + delta.log_probs[n];
        if (std::isnan(score)) refuse("the path score of token " + std::to_string(delta.tokens[n]) + " is not a number");
        if (delta.roles[n] < kPrimary || delta.roles[n] > kProbe) refuse(std::to_string(delta.roles[n]) + " is no role");
        declare(parent, kPicked);
        if (first_child_[parent] >= 0 && first_child_[parent] < known && child(parent, delta.tokens[n]) >= 0) continue;
        append(parent, delta.tokens[n], std::min(score, scores[parent]), delta.roles[n], delta.ids[n]);
        ++added;
    }
    return {added, orphans};
}

std::vector<int64_t> SlotMap::ids() const {
    std::vector<int64_t> found;
    for (const auto& [id, slot] : slots_) found.push_back(id);
    return found;
}

std::pair<std::vector<int>, std::vector<int>> SlotMap::expand(const TokenTree& tree, const std::vector<int>& nodes,
                                                              int first, int missing) {
    std::vector<int> tokens, parents;
    for (const int node : nodes) {
        if (node < 0 || node >= tree.size()) refuse("node " + std::to_string(node) + " is not in the tree");
        const int above = node ? get(tree.ids[tree.parents[node]]) : kPrefix;
        if (node && above < 0) refuse("the parent of node " + std::to_string(node) + " was not expanded");
        tokens.push_back(tree.tokens[node]);
        parents.push_back(above + missing);
        slots_[tree.ids[node]] = first++;
    }
    return {std::move(tokens), std::move(parents)};
}

std::pair<std::vector<int>, std::vector<int>> SlotMap::follow(const std::vector<int64_t>& accepted,
                                                              const TokenTree& tree) {
    std::vector<int> path, live;
    for (const int64_t id : accepted) {
        const int slot = get(id);
        if (slot < 0) break;
        path.push_back(slot);
    }
    std::unordered_map<int64_t, int> kept;
    for (const int64_t id : tree.ids) {
        const int slot = get(id);
        if (slot < 0) continue;
        kept[id] = static_cast<int>(live.size());
        live.push_back(slot);
    }
    slots_ = std::move(kept);
    reset();
    return {std::move(path), std::move(live)};
}

void OfferMap::record(const TokenTree& tree, const std::vector<int>& nodes, const ProposalRows& rows) {
    if (static_cast<int>(nodes.size()) != rows.count) refuse("every node needs its proposals");
    for (int n = 0; n < rows.count; ++n) {
        if (nodes[n] < 0 || nodes[n] >= tree.size()) refuse("node " + std::to_string(nodes[n]) + " is not in the tree");
        if (!rows.at(n).tokens.empty()) offers_[tree.ids[nodes[n]]] = {rows.rows, rows.first + n, 1};
    }
}

void OfferMap::keep(const SlotMap& slots) {
    std::erase_if(offers_, [&](const auto& entry) { return !slots.contains(entry.first); });
}

void PendingNodes::add(const std::vector<int>& new_parents) {
    for (const int parent : new_parents) {
        const int node = size();
        if (parent < kPrefix || parent >= node) refuse("parent " + std::to_string(parent) + " is not pending");
        parents.push_back(parent);
        depths.push_back(parent == kPrefix ? 0 : depths[parent] + 1);
    }
}

std::string PendingNodes::mask(int first) const {
    if (first < 0 || first > size()) refuse("row " + std::to_string(first) + " is not pending");
    const std::size_t width = size();
    std::string rows((width - first) * width, '\0');
    for (std::size_t node = first; node < width; ++node)
        for (int seen = static_cast<int>(node); seen >= 0; seen = parents[seen])
            rows[(node - first) * width + seen] = 1;
    return rows;
}

void PendingNodes::keep(const std::vector<int>& live) {
    std::vector<int> places(size(), kPrefix), above;
    for (std::size_t n = 0; n < live.size(); ++n) {
        if (live[n] < 0 || live[n] >= size()) refuse("node " + std::to_string(live[n]) + " is not pending");
        places[live[n]] = static_cast<int>(n);
        above.push_back(parents[live[n]] < 0 ? kPrefix : places[parents[live[n]]]);
    }
    parents.clear();
    depths.clear();
    add(above);
}

std::vector<int> SlotMap::next(const TokenTree& tree, int count, double floor, int deepest) {
    if (floor != floor_ || tree.num_confirmed != num_confirmed_) reset();
    floor_ = floor;
    num_confirmed_ = tree.num_confirmed;
    if (seen_ > tree.size()) refuse("the nodes to expand are those of another tree: reset them");
    std::vector<int> nodes;
    const auto is_reachable = [&](int node) {
        return !node || std::find(nodes.begin(), nodes.end(), tree.parents[node]) != nodes.end() ||
               contains(tree.ids[tree.parents[node]]);
    };
    for (bool is_retried = false;; is_retried = true) {
        for (; seen_ < tree.size(); ++seen_)
            if (tree.roles[seen_] != kProbe && tree.scores[seen_] >= floor && tree.depths[seen_] <= deepest &&
                !contains(tree.ids[seen_])) {
                open_.emplace_back(-tree.scores[seen_], seen_);
                std::push_heap(open_.begin(), open_.end(), std::greater<>());
            }
        for (; count > static_cast<int>(nodes.size()) && !open_.empty(); open_.pop_back()) {
            std::pop_heap(open_.begin(), open_.end(), std::greater<>());
            nodes.push_back(open_.back().second);
        }
        if (std::all_of(nodes.begin(), nodes.end(), is_reachable)) break;
        if (is_retried) return {};
        nodes.clear();
        reset();  // another drafter has raised scores since
    }
    const double lowest = tree.bound({});
    std::erase_if(nodes, [&](int node) { return tree.scores[node] < lowest; });
    std::sort(nodes.begin(), nodes.end());
    return nodes;
}

std::vector<int> SlotMap::peek(int count) const {
    auto sorted = open_;
    const auto end = sorted.begin() + std::min<std::size_t>(std::max(count, 0), sorted.size());
    std::partial_sort(sorted.begin(), end, sorted.end());
    std::vector<int> nodes;
    for (auto entry = sorted.begin(); entry != end; ++entry) nodes.push_back(entry->second);
    std::sort(nodes.begin(), nodes.end());
    return nodes;
}

void PickModel::Rate::learn(double more, double weight) {
    numerator = numerator * kMemory + more;
    denominator = denominator * kMemory + weight;
}

PickModel::PickModel(bool has_shares) : has_shares_(has_shares) { restore({1.0, 0.9, 1.0}, 4.0, 0.5); }

void PickModel::restore(const Calibration& fit, double coverage_weight, double open_weight) {
    coverage_ = {fit.coverage * coverage_weight, coverage_weight};
    open_ = {fit.open * open_weight, open_weight};
    temperature_ = kTemperatures[0];
    for (const double known : kTemperatures)
        if (std::abs(known - fit.temperature) < std::abs(temperature_ - fit.temperature)) temperature_ = known;
    likelihoods_.clear();
    for (const double known : kTemperatures)
        likelihoods_.push_back(-kDoubt * std::pow(std::log(known / temperature_), 2));
}

Calibration PickModel::fit() const { return {temperature_, coverage_.value(), has_shares_ ? open_.value() : -1.0}; }

void PickModel::learn(const std::vector<double>& values, int picked) {
    if (picked >= static_cast<int>(values.size())) refuse("the picked proposal has no value");
    coverage_.learn(picked >= 0, 1.0);
    if (has_shares_) open_.learn(picked < 0, left_open(values));
    if (picked < 0) return;
    const double top = *std::max_element(values.begin(), values.end());
    for (std::size_t n = 0; n < likelihoods_.size(); ++n) {
        double sum = 0.0;
        for (const double value : values) sum += std::exp((value - top) / kTemperatures[n]);
        likelihoods_[n] = likelihoods_[n] * kMemory + (values[picked] - top) / kTemperatures[n] - std::log(sum);
    }
    temperature_ = kTemperatures[std::max_element(likelihoods_.begin(), likelihoods_.end()) - likelihoods_.begin()];
}

void PickModel::learn_written(const OfferMap& offers, const std::vector<int64_t>& nodes,
                              const std::vector<int64_t>& written) {
    for (std::size_t n = 0; n < std::min(nodes.size(), written.size()); ++n)
        if (const Proposals* proposals = offers.get(nodes[n])) {
            const auto place = std::find(proposals->tokens.begin(), proposals->tokens.end(), written[n]);
            learn(proposals->values, place == proposals->tokens.end() ? -1 : static_cast<int>(place - proposals->tokens.begin()));
        }
}

std::vector<double> PickModel::log_chances(const std::vector<double>& values, int count) const {
    if (values.empty()) return {};
    double sum = 0.0, coverage = coverage_.value();
    for (const double value : values) sum += std::exp((value - values[0]) / temperature_);
    if (has_shares_) {
        const bool is_known = temperature_ == 1.0;  // the sum of the probabilities
        const double left = is_known ? std::max(0.0, 1.0 - sum * std::exp(values[0])) : left_open(values);
        coverage = std::max(kMinCoverage, 1.0 - open_.value() * left);
    }
    const double shift = std::log(coverage / sum);
    std::vector<double> found;
    for (int n = 0; n < std::min(count, static_cast<int>(values.size())); ++n)
        found.push_back((values[n] - values[0]) / temperature_ + shift);
    return found;
}

}  // namespace outpace

"""The mistakes that mutations.py puts into the kernels, by what they concern."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """`before` stands once in src/`file`; `after` takes its place."""

    name: str
    file: str
    before: str
    after: str

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """Puts the mistake into the copy at `root`. ValueError where the sources have moved on."""
        place = root / "src" / self.file
        text = place.read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.before!r} stands {text.count(self.before)} times in {self.file}")
        place.write_text(text.replace(self.before, self.after), encoding="utf-8")
        try:
            yield
        finally:
            place.write_text(text, encoding="utf-8")


MUTATIONS = (
    # products
    Mutation("the last panel's tail is not written", "product.h", "for (int i = 0; i < outputs; ++i) out[i] = from[i];",
             "for (int i = 0; i < outputs / kLanes * kLanes; ++i) out[i] = from[i];"),
    Mutation("a bias for one row only", "product.h", "if (!weights.bias) return;",
             "if (!weights.bias || tile.rows > 1) return;"),
    Mutation("rows that do not fill a tile are left out", "product.h", "rows * (number + 1) / tiles - first",
             "rows / tiles"),
    Mutation("half of one row's chains is dropped", "product.h", "sums[0][r][v] + sums[kChains - 1][r][v]",
             "sums[0][r][v]"),
    Mutation("the first row's scale for all rows", "product.h", "Floats::all(at.facts[r].scale)",
             "Floats::all(at.facts[0].scale)"),
    Mutation("a group of another row", "layout.h", "static_cast<int64_t>(group) * rows + row;",
             "static_cast<int64_t>(group) * rows;"),
    Mutation("a wrong offset for weights that stand as w + 128", "rowwise.h",
             "-128 * (halves[0] + halves[1])", "-127 * (halves[0] + halves[1])"),
    Mutation("gate and up change places", "product.h", "silu(Floats::load(gate)) * up",
             "silu(up) * Floats::load(gate)"),
    Mutation("what a layer adds takes the place of its input", "product.h", "if (task.add)", "if (false)"),
    Mutation("matrices in a room lie on top of each other", "room.h", "used_ += size;", ""),
    # four bits
    Mutation("no narrower range is tried", "rounding.cpp", "if (range.error < best.error) best = range;", ""),
    Mutation("the largest weights lose their level", "rounding.cpp", "level < 15.0f ? level : 15.0f",
             "level < 14.0f ? level : 14.0f"),
    Mutation("the upper half of a block is the lower one", "rounding.cpp",
             "levels[i + kHalfBlock] << 4", "levels[i] << 4"),
    # a file's weights
    Mutation("the upper nibbles are the lower ones", "stored_product.h", "bits<kAt < 4 ? 0 : -4, 15>", "bits<0, 15>"),
    Mutation("a fifth bit of another step", "stored_product.h", "bits<4 - kAt, 16>", "bits<3 - kAt, 16>"),
    Mutation("the sixth bit is left out", "stored_product.h", "bits<4 - kAt / 2 * 2, 48>", "bits<4 - kAt / 2 * 2, 16>"),
    Mutation("the first part's minimum for both", "stored_product.h", "mins[Part]", "mins[0]"),
    Mutation("a bias of the whole group", "stored_product.h", "sums[part * kCount + i]", "sums[i]"),
    Mutation("the first row's scale for a file's weights", "stored_product.h",
             "in.facts[r].scale", "in.facts[0].scale"),
    Mutation("the first row's activations for a file's weights", "stored_product.h", "values + r * kGroup + 4 * kAt",
             "values + 4 * kAt"),
    Mutation("scales of scales stay those of the first block", "stored_product.h",
             "header = place, place += F::kHeader", "place += F::kHeader"),
    Mutation("the sum of half a group misses a quarter", "rowwise.h", "facts.sums[2] + facts.sums[3]}",
             "facts.sums[2]}"),
    Mutation("a minimum with its sign", "blocks.cpp", "short_word(block + 2) ^ 0x8000u", "short_word(block + 2)"),
    Mutation("six bits without their upper two", "blocks.cpp", "(p[part + 4] & 15) | p[part - 4] >> 6 << 4",
             "(p[part + 4] & 15)"),
    Mutation("the second pair of groups reads the first's bits", "blocks.cpp", "block + 64 * (at / 2)", "block"),
    Mutation("zeros are taken for what they are times the scale", "stored_product.h", "m = m * c;", ";"),
    Mutation("zeros are read back without their scale", "stored.cpp", "held * c : held", "held : held"),
    Mutation("the second half of a block of 64 is the first", "blocks.cpp", "block + 4 + half * kHalfGroup / 2",
             "block + 4"),
    Mutation("the second half of a group has the first's numbers", "formats.h", "(part * kShares / kParts * kNumbers",
             "(part * kShares / kParts / kParts * kNumbers"),
    Mutation("a block of 64 is cut where a chunk ends", "stored.cpp", "block.inputs > kHalfGroup && chunk % kGroup",
             "block.inputs > kGroup && chunk % kGroup"),
    Mutation("padding within a chunk is forgotten", "blocks.cpp", "return first < most ?", "return true ?"),
    Mutation("infinite scales are taken", "stored.cpp", "(half & 0x7c00u) != 0x7c00u", "true"),
    Mutation("a section is said to begin where the last one ends", "matrix.cpp",
             "place += (end - sections_[number].first)", "place += (end - sections_[number].first - 1)"),
    Mutation("a panel may have two formats", "matrix.cpp",
             "if (!sections.empty() && output % kPanel) throw", "if (false) throw"),
    Mutation("avx2 takes the sign of activations for that of weights", "lanes_avx2.h",
             "_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a.v, w))",
             "_mm256_maddubs_epi16(_mm256_abs_epi8(a.v), _mm256_sign_epi8(w, a.v))"),
    Mutation("avx2 looks weights up with their offset", "lanes_avx2.h",
             "_mm256_broadcastsi128_si256(_mm_xor_si128(stored, _mm_set1_epi8(-128)))",
             "_mm256_broadcastsi128_si256(stored)"),
    Mutation("avx2 adds the lower half's nibbles twice", "lanes_avx2.h", "add_pairs(_mm256_setzero_si256(), hi)",
             "add_pairs(_mm256_setzero_si256(), lo)"),
    Mutation("numbers of five bits are summed as nibbles are", "stored_product.h", "F::kBits == 4 && !F::kHasTable",
             "F::kBits <= 5 && !F::kHasTable"),
    # rounding
    Mutation("a wrong scale of activations", "rowwise.h", "top / 127.0f;", "top / 128.0f;"),
    Mutation("weights' scales are rounded down", "half.h", "(bits + 0xffffu) >> 16", "bits >> 16"),
    Mutation("weights are rounded one step too high", "matrix.cpp", "/ scale + 12582912.0f", "/ scale + 12582913.0f"),
    Mutation("the largest weight of a group is one of the first 56", "matrix.cpp", "i < kGroup; i += 8",
             "i < 56; i += 8"),
    Mutation("a fifth bit of another step is read back", "stored.cpp", "at(kLowSteps + half) >> step",
             "at(kLowSteps + half) >> (7 - step)"),
    Mutation("a bias without its last output", "matrix.cpp", "bias_.assign(bias, bias + outputs_);",
             "bias_.assign(bias, bias + outputs_ - 1);"),
    Mutation("half precision is cut, not rounded", "half.h", "bits += 0xfffu + ((bits >> 13) & 1u);", ""),
    Mutation("avx2 reads half precision's lower half twice", "lanes_avx2.h",
             "_mm256_cvtph_ps(_mm_loadu_si128(eights + 1))", "_mm256_cvtph_ps(_mm_loadu_si128(eights))"),
    Mutation("avx2 takes weights as unsigned", "lanes_avx2.h", "_mm256_set1_epi8(-128)", "_mm256_set1_epi8(0)"),
    Mutation("avx512 adds its halves in another order", "lanes_avx512.h", "_mm_movehl_ps(four, four));\n    return "
             "_mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)))", "_mm_movehdup_ps(four));\n    return "
             "_mm_cvtss_f32(_mm_add_ss(four, _mm_movehl_ps(four, four)))"),
    # row by row
    Mutation("a norm without its epsilon", "rowwise.h", "(size) + epsilon)", "(size))"),
    Mutation("turned the other way", "rowwise.h", "-(second * sine)", "second * sine"),
    Mutation("keys are scaled as queries are", "rowwise.h", "key_norm, 1.0f, x", "key_norm, heads.scale, x"),
    Mutation("only the first rows are turned", "kernels.h", "((rows + kRotateRows - 1) / kRotateRows)", "1"),
    Mutation("a value of the next head", "rowwise.h", "x + heads.keys * heads.depth",
             "x + (heads.keys + 1) * heads.depth"),
    Mutation("silu without its one", "exponential.h", "Floats::all(1.0f) + exponential", "exponential"),
    Mutation("a polynomial one degree short", "exponential.h", "p = fma(p, r, Floats::all(1.0f / 24));", ""),
    # attention
    Mutation("a missing mask: a node sees its siblings", "pass.cpp", "if (sees[other]) scratch_", "scratch_"),
    Mutation("a missing mask: the first gap is not seen", "pass.cpp",
             "while (!span.gap && gapless < columns && sees[gapless])", "while (!span.gap && gapless < columns)"),
    Mutation("pending nodes are overwritten by new ones", "pass.cpp", "span.committed + span.pending + node",
             "span.committed + node"),
    Mutation("a tile reaches as far as its first query", "attention.h", "if (reach.last_slot() > last)",
             "if (last == 0)"),
    Mutation("what one query sees, all do", "attention.h", "if (reach.run < common)", "if (reach.run > common)"),
    Mutation("scores of ancestors stay where they lie", "attention.h",
             "query.scores[query.reach.run + i] = query.scores[query.reach.more[i]];", ";"),
    Mutation("weights that do not add up to one", "attention.h", "query.inverse = exponentials(query.scores, "
             "query.reach.count());", "query.inverse = exponentials(query.scores, query.reach.count() - 1);"),
    Mutation("every head reads the first head's keys", "attention.h",
             "static_cast<int64_t>(tile.key_head) * store.slots", "static_cast<int64_t>(0) * store.slots"),
    # what a session holds
    Mutation("keeping moves keys, not values", "store.cpp",
             "give(value_place(heads_, place, head, slot), size);", "from += size;"),
    Mutation("keeping leaves slots where they are", "store.cpp", "start + static_cast<int>(n);", "source[n];"),
    Mutation("a copy without its last block", "store.cpp", "whole = round_up(count, kLanes);",
             "whole = count / kLanes * kLanes;"),
    Mutation("a copy of the first layer only", "store.cpp", "copy_in(number, other, count);",
             "copy_in(0, other, count);"),
    Mutation("keys in int8 move without their scales", "store.cpp",
             "each(round_up(heads.depth, kScaled) / kScaled, Bytes<2>{});", ""),
    Mutation("one scale for a whole key in int8", "held.h", "(depth + entry / kScaled * 2) * kLanes",
             "depth * kLanes"),
    Mutation("one scale for a whole value in int8", "held.h", "slot + width + entry / kScaled * 2", "slot + width"),
    Mutation("int8 cuts entries off", "held.h", "std::lrintf(x[i] / scale)", "static_cast<long>(x[i] / scale)"),
    Mutation("the scales of keys lie on each other", "held.h", "first / kScaled * 2 * stride", "first / kScaled * 2"),
    Mutation("a store that grows leaves its slots where they are", "store.cpp", "    spread(slots);\n", ""),
    Mutation("heads are spread from the first to the last", "store.cpp", "slots > slots_ ? parts - 1 - n : n", "n"),
    Mutation("heads are drawn together from the last to the first", "store.cpp",
             "slots > slots_ ? parts - 1 - n : n", "parts - 1 - n"),
    Mutation("a store that shrinks keeps its memory", "store.cpp",
             "if (slots < slots_) data_.resize(bytes_of(heads_, layers_, slots));", ""),
    # what few passes ask for
    Mutation("hidden states of all layers in one place", "pass.cpp", "static_cast<int64_t>(tap) * taps.num_rows",
             "static_cast<int64_t>(0) * taps.num_rows"),
    Mutation("hidden states before the layer", "pass.cpp", "if (taps.layers[tap] != number) continue;",
             "if (taps.layers[tap] != number + 1) continue;"),
    Mutation("hidden states of the first rows", "pass.cpp", "static_cast<int64_t>(taps.rows[i]) * stride_",
             "static_cast<int64_t>(i) * stride_"),
    Mutation("an MLP goes with its attention", "pass.cpp", "if (!skips(number, 1)) feed",
             "if (!skips(number, 0)) feed"),
    Mutation("the first layer's switches for all", "pass.h", "forest_.skipped[2 * number + sublayer]",
             "forest_.skipped[sublayer]"),
    Mutation("what lies in a gap is seen", "pass.cpp", "span.committed - span.gap + gapless",
             "span.committed + gapless"),
    Mutation("what follows a gap lengthens the run", "pass.cpp", "while (!span.gap && gapless", "while (gapless"),
    Mutation("the first vector for all nodes", "pass.cpp", "span.inputs + node * model_", "span.inputs + 0 * model_"),
    Mutation("the first layer's steering for all", "pass.cpp", "static_cast<int64_t>(number) * middle}",
             "static_cast<int64_t>(0) * middle}"),
    Mutation("a tile is steered as its first row", "product.h", "steered(task, tile.first + r, output",
             "steered(task, tile.first, output"),
    Mutation("a group is steered by its first numbers", "product.h", "group * kGroup + part * kLanes;\n",
             "group * kGroup;\n"),
    Mutation("scores of the first hidden state for all", "pass.cpp", "static_cast<int64_t>(row) * size, row)",
             "static_cast<int64_t>(0) * size, row)"),
    Mutation("gaps are not checked", "model.cpp", "span.gap <= span.committed", "true"),
    Mutation("shown rows are not checked", "model.cpp", "taps.rows[i] < rows", "true"),
    Mutation("layers that are shown are not checked", "model.cpp", "taps.layers[i] <= num_layers()", "true"),
    # the best of a row
    Mutation("a bound on the noise that is too low", "ranking.h", "(31 + 127) * kLog2 + 1e-3f",
             "(31 + 127) * kLog2 - 1.0f"),
    Mutation("equal ones in the order of the last", "ranking.h", "places[at - 1].value < one.value",
             "places[at - 1].value <= one.value"),
    Mutation("a row's end is not filled up", "ranking.h", "i < count ? task.scores[first + i] : -kInfinity",
             "i < count ? task.scores[first + i] : 0.0f"),
    Mutation("noise by the place in the row", "ranking.h", "if (task.tokens)\n        for", "if (false)\n        for"),
    Mutation("a row with no number in it has an order", "ranking.h", "odd == odd && top", "top"),
    Mutation("filters: equals of the last that is left go", "filtering.h", "while (count > 0 && count <",
             "while (false && count <"),
    Mutation("filters: the token that crosses top-p goes", "filtering.h", "std::min(before + 1, count)",
             "std::min(before, count)"),
    Mutation("filters: too much is dropped before the border is sought", "filtering.h", "bin(one.y) > last;",
             "bin(one.y) >= last && last;"),
    Mutation("filters: who may be beyond the border wins", "filtering.h",
             "if (!task.whole && first >= border.sure) return 0;", ""),
    Mutation("filters: top-k leaves all", "filtering.h", "std::min(filters.top_k, count) : count;", "count : count;"),
    Mutation("filters: min-p leaves all", "filtering.h", "if (filters.min_p > 0.0) border.cut(",
             "if (false) border.cut("),
    Mutation("filters: the largest may go by min-p", "filtering.h", " || one.y == found[0].y;", ";"),
    Mutation("filters: shares of all tokens", "filtering.h", "sum += __builtin_exp(beside);",
             "sum += 1e-3 + __builtin_exp(beside);"),
    Mutation("a race that is too close is called", "noise.h", "> best.values[1] + margin", "> best.values[1]"),
    Mutation("all choices have the same noise", "noise.h", "{seed, choice, position,", "{seed, uint64_t{0}, position,"),
    # the team
    Mutation("every range begins at the first unit", "team.h", "f(first + next)", "f(next)"),
    Mutation("every tile reads the first session's keys", "pass.cpp", "push_back({static_cast<int>(number), head, ",
             "push_back({0, head, "),
    # a pair's rounds
    Mutation("a pair: what was walked stays where it lies", "turn.cpp",
             "if (is_moved) place.store->move(source, place.length);", ""),
    Mutation("a pair: a verified node sees itself alone", "turn.h",
             "sees[n * count + places[above]] = 1;", "if (above == node) sees[n * count + places[above]] = 1;"),
    Mutation("a pair: an expanded node sees its parent alone", "turn.h",
             "slot != kNoParent; slot = next) {", "slot != kNoParent && slot >= above; slot = next) {"),
    Mutation("a pair: the draft forgets what it has not read", "turn.cpp",
             "request.missing.push_back(tree.token(node));", "(void)node;"),
    Mutation("a pair: a leaf that was accepted counts as read", "turn.cpp",
             "if (tree.slot(node) >= 0 && request.missing.empty())", "if (tree.slot(node) >= -1)"),
    Mutation("a pair: the next request's picks", "pair.cpp", "n < turn.nodes.size(); ++n) picks.back().push_back(",
             "n < turn.nodes.size(); ++n) picks.front().push_back("),
    Mutation("a pair: positions are those of the root", "turn.h",
             "std::min(place.length + depths[n], side_.last_position)",
             "std::min(place.length, side_.last_position)"),
    Mutation("a pair: noise of the root's position for all nodes", "turn.h", "+ tree.depth(node) + 1;", "+ 1;"),
    Mutation("a pair: values that are no shares are taken for some", "planned_tree.cpp",
             "fit.open < 0.0 ? fit.coverage : of_shares", "of_shares"),
    # what panels are packed from
    Mutation("floats: padding is read", "stored.cpp", "std::clamp(end - first, 0, kGroup)", "kGroup"),
    Mutation("floats: a chunk begins where its padding does", "stored.cpp", "before = first / room * stored.chunk;",
             "before = first / room * room;"),
    Mutation("floats: what is not finite is taken", "stored.cpp", "return top != 0x7f800000u;", "return true;"),
    Mutation("floats: formats are mixed", "stored.cpp", "part.format != parts[0].format", "false"),
    Mutation("words: nibbles of the wrong half", "words.cpp", "spread(word[kPart / 2 * row]) << 4",
             "spread(word[row]) << 4"),
    Mutation("words: outputs in their own order", "words.cpp", "bytes[kOrder[place] * stride + i]",
             "bytes[place * stride + i]"),
    Mutation("words: zeros count from 0", "words.cpp", "15) + words.first_zero;", "15);"),
    Mutation("words: zeros of outputs in their own order", "words.cpp",
             "words.by_output ? static_cast<int>(std::find(", "false ? static_cast<int>(std::find("),
    Mutation("words: the first group's numbers", "words.cpp", "first / words.group,", "0,"),
    # what does not fit
    Mutation("tokens are not checked", "model.cpp", "token >= 0 && token < embedding_->outputs()", "true"),
    Mutation("spans are not checked", "model.cpp",
             "span.committed + span.pending + span.tokens <= span.store->slots()", "true"),
    Mutation("stores are not checked", "model.cpp", "span.store->layers() == num_layers()", "true"),
)  # fmt: skip

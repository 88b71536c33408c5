// Products of whole panels: tiles of rows, and where sums are added. Include after a lanes_*.h.
#pragma once

#include "exponential.h"
#include "stored_product.h"
#include "kernels.h"
#include "rowwise.h"

namespace outpace {
namespace {

/// R rows times one panel.
template <int R>
inline void multiply_rows(Format format, const uint8_t* panel, const Activations& in, const Tile& tile, float* out) {
    for (int first = 0; first < kPanel / kLanes; first += kTileVectors) {
        with_format(format, [&](auto f) {
            multiply_stored<decltype(f), R, kTileVectors>(panel, first, in, tile, out);
        });
    }
}

/// Multiplies a tile's rows by one panel and adds the bias: out [rows, kPanel].
inline void multiply(const Panels& weights, int panel, const Activations& in, const Tile& tile, float* out) {
    static_assert(kTileRows <= 6);
    const Section& section = weights.section(panel);
    const uint8_t* blocks = Panels::blocks(section, panel);
    switch (tile.rows) {
        case 1: multiply_rows<1>(section.format, blocks, in, tile, out); break;
        case 2: multiply_rows<2>(section.format, blocks, in, tile, out); break;
        case 3: multiply_rows<kTileRows >= 3 ? 3 : 1>(section.format, blocks, in, tile, out); break;
        case 4: multiply_rows<kTileRows >= 4 ? 4 : 1>(section.format, blocks, in, tile, out); break;
        case 5: multiply_rows<kTileRows >= 5 ? 5 : 1>(section.format, blocks, in, tile, out); break;
        default: multiply_rows<kTileRows >= 6 ? 6 : 1>(section.format, blocks, in, tile, out);
    }
    if (!weights.bias) return;
    const float* bias = weights.bias + panel * kPanel;
    for (int r = 0; r < tile.rows; ++r)
        for (int i = 0; i < kPanel; ++i) out[r * kPanel + i] = out[r * kPanel + i] + bias[i];
}

/// Cuts rows into tiles of nearly equal size, at most kTileRows. `ahead`: distance to what is needed next.
template <class F>
inline void for_tiles(int rows, int64_t ahead, bool prefetches, F f) {
    const bool is_near = prefetch_policy().is_near;
    const int tiles = (rows + kTileRows - 1) / kTileRows;
    for (int number = 0; number < tiles; ++number) {
        const int first = rows * number / tiles;
        const bool is_last = number == tiles - 1;
        const uint32_t last_steps = tiles == 2 ? 0xaaaa : prefetches ? 0xffff : 0;
        const uint32_t steps = is_last ? last_steps : tiles == 2 ? 0x5555 : 0;
        f(Tile{first, rows * (number + 1) / tiles - first, ahead, ahead, steps, is_near, tiles == 1});
    }
}

void product(const Product& task, int panel) {
    const Panels& weights = task.weights;
    const int first_output = panel * kPanel;
    const int outputs = weights.outputs - first_output < kPanel ? weights.outputs - first_output : kPanel;
    const Section& section = weights.section(panel);
    const int64_t ahead = task.prefetch.ahead(panel, Panels::blocks(section, panel), section.panel_bytes);
    for_tiles(task.rows, ahead, task.prefetch.is_on, [&](const Tile& tile) {
        alignas(64) float products[kTileRows * kPanel];
        for (int r = 0; r < tile.rows; ++r)  // other cores read the residual, and an output layer's logits are cold
            for (int i = 0; i < kPanel; i += kLanes)
                __builtin_prefetch(task.out + (tile.first + r) * task.stride + first_output + i, 1);
        multiply(weights, panel, task.in, tile, products);
        for (int r = 0; r < tile.rows; ++r) {
            float* out = task.out + (tile.first + r) * task.stride + first_output;
            const float* from = products + r * kPanel;
            if (task.add) {
                for (int i = 0; i < outputs; ++i) out[i] = out[i] + from[i];
            } else {
                for (int i = 0; i < outputs; ++i) out[i] = from[i];
            }
        }
    });
}

/// Adds the row's MLP bias, if it has one, to a vector of the up projection.
inline Floats add_mlp_bias(const GatedProduct& task, int row, int output, Floats up) {
    if (!task.mlp_bias || !task.mlp_bias[row]) return up;
    return up + Floats::load(task.mlp_bias[row] + task.mlp_bias_first + output);
}

void gated_product(const GatedProduct& task, int group) {
    constexpr int kPanels = kGroup / kLanes;  // each panel gives 16 outputs
    const Section& section = task.weights.section(group * kPanels);
    const uint8_t* place = Panels::blocks(section, group * kPanels);
    const int64_t ahead = task.prefetch.ahead(group, place, kPanels * section.panel_bytes);
    for_tiles(task.rows, ahead, task.prefetch.is_on, [&](Tile tile) {
        alignas(64) float gated[kTileRows * kGroup];
        for (int r = 0; r < tile.rows; ++r) task.out.from(tile.first + r, group).prefetch_for_write();
        for (int part = 0; part < kPanels; ++part) {
            alignas(64) float products[kTileRows * kPanel];
            const bool is_last = part == kPanels - 1;
            tile.next = is_last ? ahead - part * section.panel_bytes : section.panel_bytes;
            multiply(task.weights, group * kPanels + part, task.in, tile, products);
            for (int r = 0; r < tile.rows; ++r) {
                const float* gate = products + r * kPanel;
                const int output = group * kGroup + part * kLanes;
                const Floats up = add_mlp_bias(task, tile.first + r, output, Floats::load(gate + kLanes));
                const Floats at_gate = Floats::load(gate);
                const Floats out = task.gating == Gating::clamped ? clamped_gate(at_gate, up, task.limit)
                                                                  : (task.gating == Gating::gelu ? gelu(at_gate) : silu(at_gate)) * up;
                out.store(gated + r * kGroup + part * kLanes);
            }
        }
        for (int r = 0; r < tile.rows; ++r) quantize_group(gated + r * kGroup, task.out, tile.first + r, group);
    });
}

}  // namespace
}  // namespace outpace

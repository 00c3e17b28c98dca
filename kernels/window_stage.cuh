// Norm and rotary embedding of the window's own heads, into shared memory and the KV pool.
#pragma once

#include "window_stream.cuh"

// Two pieces of a head, half a head apart, with their cosines, sines and norm weights.
struct HeadPieces {
    uint4 own[2], cos[2], sin[2], weight[2];

    // Loads piece lane % (PIECES / 2) and its partner; zeros where `is_present` is false.
    __device__ void load(const Windows& w, int token, int head, bool is_present) {
        const int first = threadIdx.x % (PIECES / 2), num_heads = w.heads() + 2 * w.kv_heads;
        const i64 head_row = static_cast<i64>(token) * num_heads + head;
        const uint4* heads = reinterpret_cast<const uint4*>(w.qkv) + head_row * PIECES;
        const i64 rotary = static_cast<i64>(token) * 2 * PIECES;
        const uint4* cos_sin = reinterpret_cast<const uint4*>(w.cos_sin) + rotary;
        const uint4* norm = reinterpret_cast<const uint4*>(w.norm_weight) + head * PIECES;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int piece = first + half * (PIECES / 2);
            own[half] = cos[half] = sin[half] = weight[half] = make_uint4(0, 0, 0, 0);
            if (!is_present) continue;
            own[half] = heads[piece];
            cos[half] = cos_sin[piece];
            sin[half] = cos_sin[PIECES + piece];
            if (w.norm_weight != nullptr) weight[half] = norm[piece];
        }
    }
    // Norm and rotation of both pieces. All lanes of the warp must call it.
    __device__ void rotate(const Windows& w, uint4 (&result)[2]) const {
        float2 value[2][4];
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float2 pair = value[i / 4][i % 4] =
                unpack(reinterpret_cast<const u32*>(&own[i / 4])[i % 4]);
            square = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, square));
        }
        if (w.norm_weight != nullptr) {
#pragma unroll
            for (int distance = PIECES / 4; distance > 0; distance /= 2)
                square += __shfl_xor_sync(~0u, square, distance);
            const float scale = rsqrtf(square / HEAD_DIM + w.eps);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float2 factor = unpack(reinterpret_cast<const u32*>(&weight[i / 4])[i % 4]);
                value[i / 4][i % 4].x *= scale * factor.x;
                value[i / 4][i % 4].y *= scale * factor.y;
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int half = i / 4, pair = i % 4;
            const float2 c = unpack(reinterpret_cast<const u32*>(&cos[half])[pair]);
            const float2 s = unpack(reinterpret_cast<const u32*>(&sin[half])[pair]);
            const float2 mine = value[half][pair], other = value[1 - half][pair];
            reinterpret_cast<u32*>(&result[half])[pair] =
                pack(fmaf(mine.x, c.x, other.x * s.x), fmaf(mine.y, c.y, other.y * s.y));
        }
    }
};

// Writes the window's queries into shared memory, and its keys and values there and into the pool.
__device__ inline void stage_window(
    const Windows& w, const Part& part, uint4* queries, uint4* own_keys) {
    constexpr int LANES = PIECES / 2, AT_ONCE = THREADS / LANES;  // threads per row, rows at once
    const int piece = threadIdx.x % LANES, line = threadIdx.x / LANES;
    const int first_token = part.request * w.window;
    HeadPieces head, key;
    uint4 values[2] = {}, rotated[2];
    i64 slot = 0;
    const bool has_key = part.has_window() && line < w.window;
    const bool is_own = has_key && line >= w.window - part.num_own;
    const int key_head = w.heads() + part.kv_head;
    key.load(w, first_token + line, key_head, is_own);
    if (is_own) {
        slot = w.kv_slots[first_token + line];
        const i64 num_heads = w.heads() + 2 * w.kv_heads;
        const i64 value = (first_token + line) * num_heads + key_head + w.kv_heads;
        values[0] = reinterpret_cast<const uint4*>(w.qkv)[value * PIECES + piece];
        values[1] = reinterpret_cast<const uint4*>(w.qkv)[value * PIECES + piece + LANES];
    }
#pragma unroll
    for (int i = 0; i < (ROWS > AT_ONCE ? ROWS / AT_ONCE : 1); ++i) {
        const int row = line + i * AT_ONCE;
        const bool is_real = row < w.window * w.group;
        const int query_head = part.kv_head * w.group + row % w.group;
        head.load(w, first_token + row / w.group, query_head, is_real);
        head.rotate(w, rotated);
        if (row < ROWS) {
            queries[swizzled(row, piece)] = rotated[0];
            queries[swizzled(row, piece + LANES)] = rotated[1];
        }
    }
    key.rotate(w, rotated);
    if (!has_key) return;
    u16* target = w.layer + slot * w.token_stride() + part.kv_head * HEAD_DIM;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int at = piece + half * LANES;
        own_keys[swizzled(line, at)] = rotated[half];
        own_keys[w.window * PIECES + swizzled(line, at)] = values[half];
        if (is_own) {
            reinterpret_cast<uint4*>(target)[at] = rotated[half];
            reinterpret_cast<uint4*>(target + w.value_offset)[at] = values[half];
        }
    }
}

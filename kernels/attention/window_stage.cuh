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

#if CODES
// Of every 16 elements of a query first the even ones, then the odd ones, as `multiply_keys` has
// those of a key.
__device__ inline void store_query(uint4* queries, int row, int piece, uint4 pairs) {
    const int first = piece & ~1, half = piece & 1;
    const u32 EVEN = 0x5410, ODD = 0x7632;
    reinterpret_cast<uint2*>(queries + swizzled(row, first))[half] = make_uint2(
        __byte_perm(pairs.x, pairs.y, EVEN), __byte_perm(pairs.z, pairs.w, EVEN));
    reinterpret_cast<uint2*>(queries + swizzled(row, first + 1))[half] = make_uint2(
        __byte_perm(pairs.x, pairs.y, ODD), __byte_perm(pairs.z, pairs.w, ODD));
}

// Two numbers times `inverse_scale` to the nearest E4M3 numbers, ties to even; they saturate.
__device__ inline u32 code_pair(u32 pair, float inverse_scale) {
    const float2 numbers = unpack(pair);
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
        : "=h"(codes) : "f"(numbers.y * inverse_scale), "f"(numbers.x * inverse_scale));
    return codes;
}

// What the pool has of a piece.
typedef uint2 OwnPiece;
__device__ inline OwnPiece stored(uint4 numbers, float inverse_scale) {
    return make_uint2(
        code_pair(numbers.x, inverse_scale) | code_pair(numbers.y, inverse_scale) << 16,
        code_pair(numbers.z, inverse_scale) | code_pair(numbers.w, inverse_scale) << 16);
}
__device__ inline OwnPiece& own_place(uint4* tile, int line, int piece) {
    return reinterpret_cast<uint2*>(tile + stored_place(line, piece / 2))[piece % 2];
}
#else
__device__ inline void store_query(uint4* queries, int row, int piece, uint4 pairs) {
    queries[swizzled(row, piece)] = pairs;
}
typedef uint4 OwnPiece;
__device__ inline OwnPiece stored(uint4 numbers, float) { return numbers; }
__device__ inline OwnPiece& own_place(uint4* tile, int line, int piece) {
    return tile[swizzled(line, piece)];
}
#endif

// Writes the window's queries into shared memory, and its keys and values there and into the pool.
__device__ inline void stage_window(
    const Windows& w, const Part& part, uint4* queries, uint4* own_keys) {
    constexpr int LANES = PIECES / 2, AT_ONCE = THREADS / LANES;  // threads per row, rows at once
    const int piece = threadIdx.x % LANES, line = threadIdx.x / LANES;
    const int first_token = part.first_row;
    HeadPieces head, key;
    uint4 values[2] = {}, rotated[2];
    i64 slot = 0;
    const bool has_key = part.has_window() && line < part.num_rows;
    const bool is_own = has_key && line >= part.num_rows - part.num_own;
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
        const bool is_real = row < part.num_rows * w.group;
        const int query_head = part.kv_head * w.group + row % w.group;
        head.load(w, first_token + row / w.group, query_head, is_real);
        head.rotate(w, rotated);
        if (row < ROWS) {
            store_query(queries, row, piece, rotated[0]);
            store_query(queries, row, piece + LANES, rotated[1]);
        }
    }
    key.rotate(w, rotated);
    if (!has_key) return;
    Stored* target = w.layer + slot * w.token_stride() + part.kv_head * HEAD_DIM;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int at = piece + half * LANES;
        const OwnPiece own_key = stored(rotated[half], w.inverse_key_scale);
        const OwnPiece own_value = stored(values[half], w.inverse_value_scale);
        own_place(own_keys, line, at) = own_key;
        own_place(own_keys + w.window * STORED_PIECES, line, at) = own_value;
        if (is_own) {
            reinterpret_cast<OwnPiece*>(target)[at] = own_key;
            reinterpret_cast<OwnPiece*>(target + w.value_offset)[at] = own_value;
        }
    }
}

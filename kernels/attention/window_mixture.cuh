// The online softmax of window_attention.cu in a warp's registers.
#pragma once

#include "window_stream.cuh"

__device__ inline float power_of_two(float exponent) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
    return result;
}

__device__ inline float minus_infinity() { return __uint_as_float(0xff800000u); }
// A row that sees no key has a maximum of minus infinity.
__device__ inline float finite_base(float top) { return top == minus_infinity() ? 0.0f : top; }

// State of the online softmax for a warp's rows: the highest score of each row, the sum of the
// weights relative to it, and the sum of the weighted values. A thread holds rows lane / 4 and
// lane / 4 + 8 of each tile, and of each 8 columns of scores 2 (lane % 4) and the next one.
struct Mixture {
    float top[ROW_TILES][2], total[ROW_TILES][2], mixed[ROW_TILES][HEAD_DIM / 8][4];

    __device__ Mixture() {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            top[tile][0] = top[tile][1] = minus_infinity();
            total[tile][0] = total[tile][1] = 0.0f;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 2; ++i) mixed[tile][i / 4][i % 4] = 0.0f;
        }
    }
    // Starts with one key without a value.
    __device__ void start_with(const float (&sinks)[ROW_TILES][2], int lane) {
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; ++i) {
            top[i / 2][i % 2] = sinks[i / 2][i % 2];
            total[i / 2][i % 2] = lane % 4 == 0 ? 1.0f : 0.0f;  // four lanes have parts of the sum
        }
    }
    // Scores to weights, rounded to 16 bits for the GEMM with the values.
    __device__ void weigh(
        float (&scores)[ROW_TILES][2][4], float scale, u32 (&weights)[ROW_TILES][4]) {
        bool grew = false;
        float decay[ROW_TILES][2];
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; ++i) {
            const int tile = i / 2, half = i % 2;
            float(&low)[4] = scores[tile][0], (&high)[4] = scores[tile][1];
            const int first = 2 * half;
            float highest =
                fmaxf(fmaxf(low[first], low[first + 1]), fmaxf(high[first], high[first + 1]));
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
            const float new_top = fmaxf(top[tile][half], highest * scale);
            const float base = finite_base(new_top);
            decay[tile][half] = power_of_two(top[tile][half] - base);
            grew |= new_top != top[tile][half];
            top[tile][half] = new_top;
#pragma unroll
            for (int j = first; j < first + 2; ++j) {
                low[j] = power_of_two(fmaf(low[j], scale, -base));
                high[j] = power_of_two(fmaf(high[j], scale, -base));
            }
            total[tile][half] = total[tile][half] * decay[tile][half] + low[first] +
                low[first + 1] + high[first] + high[first + 1];
            weights[tile][half] = pack(low[first], low[first + 1]);
            weights[tile][2 + half] = pack(high[first], high[first + 1]);
        }
        if (!__any_sync(~0u, grew)) return;
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 2; ++i)
                mixed[tile][i / 4][i % 4] *= decay[tile][i / 2 % 2];
    }
    // Of codes, columns 16 i to 16 i + 15 are in mixed[2 i], the even ones, and mixed[2 i + 1].
    // values: row lane % 16 of the block.
    __device__ void add(const u32 (&weights)[ROW_TILES][4], const Line& values, int lane) {
#pragma unroll
        for (int i = 0; i < STORED_PIECES / 2; ++i) {
            u32 blocks[4];
            load_transposed_blocks(blocks, values.piece(2 * i + lane / 16));
#if CODES
#pragma unroll
            for (int piece = 0; piece < 2; ++piece) {
                // A register has two columns of two keys. Bytes 0 and 2 are the even column.
                u32 even[2], odd[2];
                widen_fp8_alternating(blocks[2 * piece], even[0], odd[0]);
                widen_fp8_alternating(blocks[2 * piece + 1], even[1], odd[1]);
                const int first = 4 * i + 2 * piece;
#pragma unroll
                for (int tile = 0; tile < ROW_TILES; ++tile) {
                    multiply(mixed[tile][first], weights[tile], even[0], even[1]);
                    multiply(mixed[tile][first + 1], weights[tile], odd[0], odd[1]);
                }
            }
#else
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) {
                multiply(mixed[tile][2 * i], weights[tile], blocks[0], blocks[1]);
                multiply(mixed[tile][2 * i + 1], weights[tile], blocks[2], blocks[3]);
            }
#endif
        }
    }
};

// keys: row lane / 16 * 8 + lane % 8 of the block.
__device__ inline void multiply_keys(
    float (&scores)[ROW_TILES][2][4], const uint4* queries, const Line& keys, int lane) {
#pragma unroll
    for (int i = 0; i < 8 * ROW_TILES; ++i) scores[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll
    for (int i = 0; i < STORED_PIECES / 2; ++i) {
        u32 blocks[4];
        load_blocks(blocks, keys.piece(2 * i + lane / 8 % 2));
#if CODES
#pragma unroll
        for (int piece = 0; piece < 2; ++piece) {
            // A thread has four neighbouring elements of a key: the even ones are pair lane % 4 in
            // the order of `store_query`, the odd ones pair 4 + lane % 4.
            u32 low[2], high[2];
            widen_fp8_alternating(blocks[piece], low[0], low[1]);
            widen_fp8_alternating(blocks[2 + piece], high[0], high[1]);
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) {
                u32 query[4];
                const int query_row = 16 * tile + lane % 16;
                load_blocks(query, queries + swizzled(query_row, 4 * i + 2 * piece + lane / 16));
                multiply(scores[tile][0], query, low[0], low[1]);
                multiply(scores[tile][1], query, high[0], high[1]);
            }
        }
#else
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            u32 query[4];
            load_blocks(query, queries + swizzled(16 * tile + lane % 16, 2 * i + lane / 16));
            multiply(scores[tile][0], query, blocks[0], blocks[1]);
            multiply(scores[tile][1], query, blocks[2], blocks[3]);
        }
#endif
    }
}

// Sets the scores that `sees(row, column)` rejects to minus infinity.
template <class Sees>
__device__ inline void hide(float (&scores)[ROW_TILES][2][4], int lane, const Sees& sees) {
#pragma unroll
    for (int i = 0; i < 8 * ROW_TILES; ++i) {
        const int row = i / 8 * 16 + i % 4 / 2 * 8 + lane / 4;
        const int column = i / 4 % 2 * 8 + lane % 4 * 2 + i % 2;
        if (!sees(row, column)) scores[i / 8][i / 4 % 2][i % 4] = minus_infinity();
    }
}

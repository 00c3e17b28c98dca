// A block of small_m_gemm.cu, 16 rows of W by BLOCK_COLUMNS columns as they lie in shared memory,
// and its product with the rows of x. For W of 16 bits, FP8 and codes of 4 bits (BITS).
#pragma once

#include "tensor_core.cuh"

#if BITS == 16
typedef u16 Weight;
#else
typedef unsigned char Weight;
#endif
#if E2M1
typedef unsigned char Scale;  // the bits of a float's exponent
#elif BITS == 4
typedef u32 Scale;
#else
typedef float Scale;
#endif

constexpr int PIECE = 8;                              // elements of x in 16 bytes
constexpr int WEIGHT_PIECE = 128 / BITS;              // and of W
constexpr int PER_WEIGHT = 8 * sizeof(Weight) / BITS; // columns in a `Weight`
constexpr int PIECES_PER_ROW = 8, BLOCK_PIECES = 16 * PIECES_PER_ROW;
constexpr int BLOCK_COLUMNS = PIECES_PER_ROW * WEIGHT_PIECE;  // a block has 16 rows of W
constexpr int BLOCKS = STEP_COLUMNS / BLOCK_COLUMNS;          // of a step
constexpr int TOKEN_PIECES = BLOCK_COLUMNS / PIECE;           // of a row of x in a block
constexpr int ROW_SCALES = GROUP ? STEP_COLUMNS / GROUP : 0;  // of a row of W in a step

// Where a row's piece of x lies, so that threads that read together use different banks. A piece of
// FP8 weights meets two of x: the first ones of a block come before the second ones. Threads that
// read 4-bit weights together meet 4 adjacent pieces of x.
__device__ inline int place(int piece) {
    if (BITS == 8) return piece & ~15 | (piece & 1) << 3 | (piece & 15) >> 1;
    if (BITS == 4) return piece & ~7 | (piece & 3) << 1 | piece >> 2 & 1;
    return piece;
}

// The same for the piece of W of a row's number, which is added to the piece's own by XOR. Threads
// that read together have 2 rows and 16 bytes each, or with 4 bits 4 rows and 8 bytes.
__device__ inline int swizzle(int row) {
    return BITS == 4 ? (row & 3) << 1 | row >> 2 & 1 : row % 8;
}

// A weight without its scale, two at a time: E2M1 numbers, or whole ones less the zero point.
__device__ inline u32 widen_codes(u32 codes, u32 zero) {
    return E2M1 ? widen_e2m1(codes) : widen_int4(codes, zero);
}
__device__ inline float group_scale(u32 word) {
    return E2M1 ? __uint_as_float(word << 23) : int4_scale(word);
}

// A piece of x whose pairs of elements are those that `widen_codes` makes of adjacent bytes.
__device__ inline uint4 paired(uint4 piece) {
    if (BITS != 4) return piece;
    return make_uint4(__byte_perm(piece.x, piece.y, 0x5410), __byte_perm(piece.x, piece.y, 0x7632),
                      __byte_perm(piece.z, piece.w, 0x5410), __byte_perm(piece.z, piece.w, 0x7632));
}

// Accumulates a block: 16 rows of W by the rows of x. `weights`: the thread's row of W, with
// `swizzle` of its number; `pieces`: its quad's of x; `scales`: of the thread's row and, 8 *
// ROW_SCALES later, of the 8th row after it.
#if BITS == 4
__device__ inline void multiply_block(
    float (&sums)[4], const uint4* weights, const uint4* pieces, int quad, int swizzle,
    const Scale* scales) {
    constexpr int HALF = 64, PART = 32;  // a thread takes 8 of 32 adjacent columns
    float partial[4] = {};
#pragma unroll
    for (int first = 0; first < BLOCK_COLUMNS; first += 2 * HALF) {
        uint2 low[2], high[2];  // each has columns of both halves
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const uint4* piece = weights + ((first / PART + 2 * part + quad / 2) ^ swizzle);
            low[part] = reinterpret_cast<const uint2*>(piece)[quad % 2];
            piece += 8 * PIECES_PER_ROW;
            high[part] = reinterpret_cast<const uint2*>(piece)[quad % 2];
        }
#pragma unroll
        for (int column = first; column < first + 2 * HALF; column += PART) {
            const int part = column / PART % 2, shift = column / HALF % 2 * 4;
            const u32 low_word = scales[column / GROUP];
            const u32 high_word = scales[8 * ROW_SCALES + column / GROUP];
            const u32 low_zero = int4_zero(low_word), high_zero = int4_zero(high_word);
            const uint4 x = pieces[column / HALF * 8 + part];
            const u32 a[2] = {low[part].x >> shift, low[part].y >> shift};
            const u32 b[2] = {high[part].x >> shift, high[part].y >> shift};
            const u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 rows[4] = {
                    widen_codes(a[i], low_zero), widen_codes(b[i], high_zero),
                    widen_codes(a[i] >> 8, low_zero), widen_codes(b[i] >> 8, high_zero)};
                multiply(partial, rows, pairs[2 * i], pairs[2 * i + 1]);
            }
            if ((column + PART) % GROUP) continue;
            for (int i = 0; i < 4; ++i) {
                sums[i] = fmaf(partial[i], group_scale(i < 2 ? low_word : high_word), sums[i]);
                partial[i] = 0.0f;
            }
        }
    }
}
#else
__device__ inline void multiply_block(
    float (&sums)[4], const uint4* weights, const uint4* pieces, int quad, int swizzle,
    const Scale* scales) {
#if BITS == 8
    float partial[4] = {};
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        const int piece = (2 * quad + odd) ^ swizzle;
        const uint4 a = weights[piece], b = weights[8 * PIECES_PER_ROW + piece];
        const uint4 c = pieces[odd], d = pieces[8 + odd];
        const u32 low[4] = {a.x, a.y, a.z, a.w}, high[4] = {b.x, b.y, b.z, b.w};
        const u32 pairs[8] = {c.x, c.y, c.z, c.w, d.x, d.y, d.z, d.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 rows[4];
            widen_fp8(low[i], rows[0], rows[2]);
            widen_fp8(high[i], rows[1], rows[3]);
            multiply(partial, rows, pairs[2 * i], pairs[2 * i + 1]);
        }
    }
    for (int i = 0; i < 4; ++i)
        sums[i] = fmaf(partial[i], scales[i / 2 * 8 * ROW_SCALES], sums[i]);
#else
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        const int piece = (2 * quad + odd) ^ swizzle;
        const uint4 a = weights[piece], b = weights[8 * PIECES_PER_ROW + piece];
        const uint4 c = pieces[odd];
        const u32 low[4] = {a.x, b.x, a.y, b.y}, high[4] = {a.z, b.z, a.w, b.w};
        multiply(sums, low, c.x, c.y);
        multiply(sums, high, c.z, c.w);
    }
#endif
}
#endif

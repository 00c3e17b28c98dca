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
typedef u32 Scale;  // a float whose last 4 bits are the zero point
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
constexpr int HALF = 64;  // a byte with two codes has columns that are so far apart

// The bits of a number of W are moved to where a 16-bit float has them, which is 2^W_POWER times
// the number, if need be a subnormal one. bfloat16 of x have the factor 2^X_POWER, so that their
// products are normal float32. Sums of a tile are divided by both.
#if BITS == 16
constexpr int X_POWER = 0, W_POWER = 0;
#elif BFLOAT16
constexpr int X_POWER = 80, W_POWER = BITS == 8 ? -120 : E2M1 ? -126 : -133;
#else
constexpr int X_POWER = 0, W_POWER = BITS == 8 ? 0 : E2M1 ? -14 : -24;
#endif

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

__device__ inline u32 scaled(u32 pair, int exponent) {
    return product(pair, (127 + exponent << 7) * 0x00010001);
}

// A piece of x as it is multiplied: with its factor, and with pairs of those elements that
// `widen_codes` and `move_fp8` make of bytes 0 and 2, or 1 and 3. piece: its number in the row.
__device__ inline uint4 prepared(uint4 x, int piece) {
    if (BITS == 16) return x;
    if (X_POWER) {
        const bool has_high_codes = BITS == 4 && !E2M1 && piece / (HALF / PIECE) % 2;
        const int exponent = X_POWER - 4 * has_high_codes;
        x = make_uint4(scaled(x.x, exponent), scaled(x.y, exponent),
                       scaled(x.z, exponent), scaled(x.w, exponent));
    }
    return make_uint4(__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632),
                      __byte_perm(x.z, x.w, 0x5410), __byte_perm(x.z, x.w, 0x7632));
}

// Codes of the low or high 4 bits of bytes 0 and 2: E2M1 numbers, or whole ones less the zero
// point, which are the last bits of floats. In bfloat16 the high ones are 16 times as much, since
// they stay in bits 4 to 7: the first normal floats, with bit 7, go on where subnormal ones end.
__device__ inline u32 widen_codes(u32 codes, bool high, u32 zero) {
    const int shift = 4 * high, kept = BFLOAT16 ? shift : 0;
#if E2M1 && BFLOAT16
    return (codes & 0x000f000f << shift) * ((1 << 12 | 1 << 6) >> shift) & 0x81c081c0;
#elif E2M1
    return (codes >> shift & 0x00080008) << 12 | (codes >> shift & 0x00070007) << 9;
#else
    const u32 numbers = codes >> shift - kept & 0x000f000f << kept;
    u32 pair;
    asm("sub.rn." PAIR " %0, %1, %2;" : "=r"(pair) : "r"(numbers), "r"(zero << kept));
    return pair;
#endif
}

__device__ inline float group_scale(u32 word) {
    return __uint_as_float(E2M1 ? word << 23 : word & ~15u);
}
// Twice the zero point.
__device__ inline u32 group_zero(u32 word) { return (word & 15) * 0x00010001; }

template <typename T>
__device__ inline T load_shared(u32 address) {
    return *static_cast<const T*>(__cvta_shared_to_generic(address));
}

// Accumulates a block: 16 rows of W by the rows of x. Addresses in shared memory are of the
// thread's first piece of its row of W, and of the row's scales, with those of the 8th row after it
// after them. pieces: its quad's of x.
__device__ inline void multiply_block(
    float (&sums)[4], u32 weights, u32 scales, const uint4* pieces) {
    constexpr int HIGH_WEIGHTS = 16 * 8 * PIECES_PER_ROW;
    constexpr int HIGH_SCALES = sizeof(Scale) * 8 * ROW_SCALES;
#if BITS == 4
    constexpr int PART = 32;  // adjacent columns of which a thread takes 8
    float partial[4] = {};
#pragma unroll
    for (int first = 0; first < BLOCK_COLUMNS; first += 2 * HALF) {
        uint2 low[2], high[2];  // each has columns of both halves
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const u32 piece = weights ^ 32 * (first / HALF + part);
            low[part] = load_shared<uint2>(piece);
            high[part] = load_shared<uint2>(piece + HIGH_WEIGHTS);
        }
#pragma unroll
        for (int column = first; column < first + 2 * HALF; column += PART) {
            const int part = column / PART % 2, scale = column / GROUP * sizeof(Scale);
            const bool in_high = column / HALF % 2;
            const u32 low_word = load_shared<Scale>(scales + scale);
            const u32 high_word = load_shared<Scale>(scales + scale + HIGH_SCALES);
            const u32 low_zero = group_zero(low_word), high_zero = group_zero(high_word);
            const uint4 x = pieces[column / HALF * 8 + part];
            const u32 a[2] = {low[part].x, low[part].y}, b[2] = {high[part].x, high[part].y};
            const u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 rows[4] = {widen_codes(a[i], in_high, low_zero),
                                     widen_codes(b[i], in_high, high_zero),
                                     widen_codes(a[i] >> 8, in_high, low_zero),
                                     widen_codes(b[i] >> 8, in_high, high_zero)};
                multiply(partial, rows, pairs[2 * i], pairs[2 * i + 1]);
            }
            if ((column + PART) % GROUP) continue;
            for (int i = 0; i < 4; ++i) {
                sums[i] = fmaf(partial[i], group_scale(i < 2 ? low_word : high_word), sums[i]);
                partial[i] = 0.0f;
            }
        }
    }
#elif BITS == 8
    float partial[4] = {};
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        const uint4 a = load_shared<uint4>(weights ^ 16 * odd);
        const uint4 b = load_shared<uint4>((weights ^ 16 * odd) + HIGH_WEIGHTS);
        const uint4 c = pieces[odd], d = pieces[8 + odd];
        const u32 low[4] = {a.x, a.y, a.z, a.w}, high[4] = {b.x, b.y, b.z, b.w};
        const u32 pairs[8] = {c.x, c.y, c.z, c.w, d.x, d.y, d.z, d.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 rows[4];
            move_fp8(low[i], rows[0], rows[2]);
            move_fp8(high[i], rows[1], rows[3]);
            multiply(partial, rows, pairs[2 * i], pairs[2 * i + 1]);
        }
    }
    for (int i = 0; i < 4; ++i)
        sums[i] = fmaf(partial[i], load_shared<float>(scales + i / 2 * HIGH_SCALES), sums[i]);
#else
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        const uint4 a = load_shared<uint4>(weights ^ 16 * odd);
        const uint4 b = load_shared<uint4>((weights ^ 16 * odd) + HIGH_WEIGHTS);
        const uint4 c = pieces[odd];
        const u32 low[4] = {a.x, b.x, a.y, b.y}, high[4] = {a.z, b.z, a.w, b.w};
        multiply(sums, low, c.x, c.y);
        multiply(sums, high, c.z, c.w);
    }
#endif
}

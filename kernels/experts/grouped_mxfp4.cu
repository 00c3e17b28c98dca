// The linear layer of each expert, with weights in MXFP4, for experts of few rows of x.
// grouped_mxfp4.py describes inputs and outputs. Compiled by NVRTC for compute capability 9.0.
//
// An item is a block of up to ROWS rows of x of one expert, by a tile of TILE rows of its weight.
// The grid is persistent: a CTA takes every gridDim.x-th item. A warp has 16 * GROUPS rows of the
// tile. Codes, exponents and rows of x of BLOCKS blocks of 128 inputs are a stage of a ring in
// shared memory, filled by asynchronous copies that run ahead across items.
//
// Codes become bfloat16 in registers, next to the tensor cores. A number times its scale is exact.
// The inputs are multiplied in their order, 16 at a time into one sum, as the Triton kernel of
// grouped_gemm_triton.py does: a row has the same bits in both.
//
// Inside an instruction the order of 16 inputs does not matter as long as both operands use the
// same one: a thread takes the 4 adjacent inputs whose codes lie in one word.
//
// Compiler options define BFLOAT16 (1), IN (inputs), GATED (whether the rows of a tile are gates
// and ups), ROWS, WARPS, GROUPS, BLOCKS, DEPTH of the ring, and CTAS of a multiprocessor.

#include "tensor_core.cuh"

constexpr int THREADS = 32 * WARPS, TILE = 16 * GROUPS * WARPS, WIDTH = GATED ? TILE / 2 : TILE;
constexpr int COLUMNS = 128, CODE_BYTES = 64;  // of a block of inputs
constexpr int IN_BLOCKS = (IN + COLUMNS - 1) / COLUMNS, STEPS = (IN_BLOCKS + BLOCKS - 1) / BLOCKS;
constexpr int PIECE = 8;                                // elements of x in 16 bytes
constexpr int CODE_PIECES = BLOCKS * CODE_BYTES / 16;   // of a row of the weight in a stage
constexpr int TOKEN_PIECES = BLOCKS * COLUMNS / PIECE;  // of a row of x
constexpr int STAGE_CODES = TILE * CODE_PIECES * 16, STAGE_WORDS = TILE * BLOCKS * 4;  // bytes
constexpr int STAGE = STAGE_CODES + STAGE_WORDS + ROWS * TOKEN_PIECES * 16;

// Same layout as _Arguments in grouped_mxfp4.py.
struct GroupedGemm {
    const u16 *x, *bias;
    const unsigned char* weight;
    const u32* words;  // a block's exponents
    u16* output;
    const int *order, *blocks, *num_blocks;
    int room, features, top_k, tiles, is_clamped;
    float limit, slope;

    __device__ u64 first_row(int expert) const {
        return static_cast<u64>(expert) * (GATED ? 2 : 1) * features;
    }
};

// The last tile has outputs of the one before, too, so that all are whole.
struct Item {
    int expert, first, num_rows, first_out;

    __device__ Item(const GroupedGemm& p, int number) {
        const int block = number / p.tiles;
        expert = p.blocks[block];
        first = p.blocks[p.room + block];
        num_rows = min(p.blocks[2 * p.room + block] - first, ROWS);
        first_out = min(number % p.tiles * WIDTH, p.features - WIDTH);
    }
    // The output of row `row` of the tile: of 16 rows 8 are gates, and 8 the ups of the same
    // outputs.
    __device__ int output(int row) const {
        return first_out + (GATED ? row / 16 * 8 + row % 8 : row);
    }
    __device__ u64 weight_row(const GroupedGemm& p, int row) const {
        return p.first_row(expert) + output(row) + (GATED && row % 16 >= 8 ? p.features : 0);
    }
};

// Where pieces lie, so that threads that read together use different banks: 8 rows of codes read
// one piece each, and 4 rows of x read two.
__device__ inline int code_place(int row, int piece) {
    return row * CODE_PIECES + (piece ^ (BLOCKS == 1 ? row >> 1 & 3 : row & 7));
}
__device__ inline int token_place(int row, int piece) {
    return row * TOKEN_PIECES + (piece ^ (row & 3) << 1);
}

__device__ inline u32 next_stage(u32 stage, u32 ring) {
    return stage == ring + (DEPTH - 1) * STAGE ? ring : stage + STAGE;
}

// Zeros past the first `bytes`.
__device__ inline void copy_piece(u32 destination, const void* source, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(destination), "l"(source), "r"(bytes) : "memory");
}
__device__ inline void copy_word(u32 destination, const u32* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
        :: "r"(destination), "l"(source) : "memory");
}

// Copies the stages of all items of the CTA, one after the other. The pieces of a thread are
// THREADS apart, and so are their places.
struct Stream {
    static constexpr int CODES = TILE * CODE_PIECES / THREADS, CODE_ROWS = THREADS / CODE_PIECES;
    static constexpr int TOKEN_ROWS = THREADS / TOKEN_PIECES, TOKENS = ROWS / TOKEN_ROWS;
    static constexpr int WORDS = TILE * BLOCKS / THREADS, WORD_ROWS = THREADS / BLOCKS;
    static_assert(CODE_ROWS % 16 == 0 && WORD_ROWS % 16 == 0, "gates and ups alternate");
    static_assert(WORDS > 0 && TOKENS > 0 && TOKEN_ROWS % 4 == 0, "no thread is idle");
    const GroupedGemm& p;
    u32 ring, stage;
    int number, num_items, step = 0, num_rows;  // from the thread's first on
    u32 code_at, token_at;                      // the places of the thread's first pieces
    const unsigned char* codes;
    const u32* words;
    const u16* tokens[TOKENS];

    __device__ Stream(const GroupedGemm& p, u32 ring, int num_items)
        : p(p), ring(ring), stage(ring), number(blockIdx.x), num_items(num_items) {
        const int row = threadIdx.x / TOKEN_PIECES, piece = threadIdx.x % TOKEN_PIECES;
        code_at = 16 * code_place(threadIdx.x / CODE_PIECES, threadIdx.x % CODE_PIECES);
        token_at = STAGE_CODES + STAGE_WORDS + 16 * token_place(row, piece);
        point();
    }
    // Outputs between rows of the tile.
    __device__ static constexpr int outputs(int rows) { return GATED ? rows / 2 : rows; }

    // Sets the pointers to the rows of the current item.
    __device__ void point() {
        if (number >= num_items) return;
        const Item item(p, number);
        const int first = threadIdx.x / TOKEN_PIECES;
        num_rows = item.num_rows - first;
        codes = p.weight + threadIdx.x % CODE_PIECES * 16
            + item.weight_row(p, threadIdx.x / CODE_PIECES) * (IN_BLOCKS * CODE_BYTES);
        words = p.words + threadIdx.x % BLOCKS
            + item.weight_row(p, threadIdx.x / BLOCKS) * IN_BLOCKS;
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            const int own = item.first + min(first + i * TOKEN_ROWS, item.num_rows - 1);
            const u64 row = GATED ? p.order[own] / p.top_k : own;
            tokens[i] = p.x + row * IN + threadIdx.x % TOKEN_PIECES * PIECE;
        }
    }
    __device__ void fetch() {
        if (number < num_items) {
            const int left = IN_BLOCKS - step * BLOCKS;  // blocks
            if (IN_BLOCKS % BLOCKS == 0 || threadIdx.x % CODE_PIECES * 16 / CODE_BYTES < left) {
#pragma unroll
                for (int i = 0; i < CODES; ++i)
                    copy_piece(stage + code_at + i * THREADS * 16,
                               codes + outputs(i * CODE_ROWS) * (IN_BLOCKS * CODE_BYTES), 16);
            }
            if (IN_BLOCKS % BLOCKS == 0 || threadIdx.x % BLOCKS < left) {
#pragma unroll
                for (int i = 0; i < WORDS; ++i)
                    copy_word(stage + STAGE_CODES + (threadIdx.x + i * THREADS) * 4,
                              words + outputs(i * WORD_ROWS) * IN_BLOCKS);
            }
            // Inputs past the end are zeros, as their codes are.
            const int column = step * BLOCKS * COLUMNS;
            const int bytes = threadIdx.x % TOKEN_PIECES * PIECE + column < IN ? 16 : 0;
#pragma unroll
            for (int i = 0; i < TOKENS; ++i)
                if (i * TOKEN_ROWS < num_rows)
                    copy_piece(stage + token_at + i * THREADS * 16, tokens[i] + column, bytes);
            stage = next_stage(stage, ring);
            codes += BLOCKS * CODE_BYTES;
            words += BLOCKS;
            if (++step == STEPS) {
                step = 0;
                number += gridDim.x;
                point();
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
};

// Products of two pairs of bfloat16.
__device__ inline u32 times(u32 pair, u32 factors) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factors));
    return product;
}

// 2^-126 times the numbers whose codes are bits 0 to 3, or with HIGH 4 to 7, of both halves: copies
// of a code lie side by side, one of which has its sign in place, and the other its other bits.
template <bool HIGH>
__device__ inline u32 small_numbers(u32 codes) {
    return (codes & (HIGH ? 0x00f000f0 : 0x000f000f)) * (HIGH ? 0x0104 : 0x1040) & 0x81c081c0;
}

// The sums of a warp: its 16 * GROUPS rows of the tile by 8 * TOKENS rows of x.
template <int TOKENS>
struct Sums {
    float sums[GROUPS][TOKENS][4] = {};

    // Adds the products of a block. The arguments are the thread's addresses, those of x by piece.
    __device__ void add(u32 codes_at, u32 words_at, const u32 (&tokens_at)[4]) {
        u32 codes[GROUPS][2][4], words[GROUPS][2], rare = 0;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = 16 * i + 8 * half;
                load_blocks(codes[i][half], codes_at + row * CODE_PIECES * 16);
                words[i][half] = load_word(words_at + row * BLOCKS * 4);
                rare |= words[i][half] | words[i][half] - 0x01010101;
            }
        // 2^126 times a scale is a bfloat16 for exponents from 1 to 128.
        if (__any_sync(~0u, rare & 0x80808080)) add<true>(codes, words, tokens_at);
        else add<false>(codes, words, tokens_at);
    }
    template <bool RARE>
    __device__ void add(const u32 (&codes)[GROUPS][2][4], const u32 (&words)[GROUPS][2],
                        const u32 (&tokens_at)[4]) {
#pragma unroll
        for (int step = 0; step < COLUMNS / 16; ++step) {
            uint2 x[TOKENS];
#pragma unroll
            for (int j = 0; j < TOKENS; ++j)
                x[j] = load_pairs(tokens_at[step % 4] + step / 4 * 128 + j * 128 * TOKEN_PIECES);
#pragma unroll
            for (int i = 0; i < GROUPS; ++i) {
                u32 a[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {  // two rows, and two pairs of inputs of each
                    const u32 four = codes[i][k % 2][step % 4];
                    const u32 two = __byte_perm(four, 0, k < 2 ? 0x4140 : 0x4342);
                    const u32 exponent = __byte_perm(words[i][k % 2], 0, 0x4440 + step / 2);
                    const u32 scale = exponent * 0x00800080 + (RARE ? 0 : 126 * 0x00800080);
                    a[k] = step < 4 ? small_numbers<false>(two) : small_numbers<true>(two);
                    a[k] = times(RARE ? times(a[k], 253 * 0x00800080) : a[k], scale);
                }
#pragma unroll
                for (int j = 0; j < TOKENS; ++j) multiply(sums[i][j], a, x[j].x, x[j].y);
            }
        }
    }
    __device__ void write(const GroupedGemm& p, const Item& item) const;
};

// With the roundings of grouped_gemm_triton.py.
__device__ inline float swiglu(const GroupedGemm& p, float gate, float up) {
    if (p.is_clamped) {
        gate = fminf(gate, p.limit);
        up = fminf(fmaxf(up, -p.limit), p.limit) + 1.0f;
    }
    const float exponent = __fmul_rn(__fmul_rn(-p.slope, gate), 1.44269504f);  // log2(e)
    float power, quotient;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(gate), "f"(1.0f + power));
    return quotient * up;
}

template <int TOKENS>
__device__ void Sums<TOKENS>::write(const GroupedGemm& p, const Item& item) const {
    const int first = threadIdx.x / 32 * 16 * GROUPS, row = threadIdx.x % 32 / 4;
    const u16* bias = p.bias == nullptr ? nullptr : p.bias + p.first_row(item.expert);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i)
#pragma unroll
        for (int half = 0; half < (GATED ? 1 : 2); ++half) {
            const int output = item.output(first + 16 * i + 8 * half + row);
            const u16* up_bias = bias + p.features;
            const float own = bias == nullptr ? 0.0f : unpack(bias[output]).x;
            const float of_up = !GATED || bias == nullptr ? 0.0f : unpack(up_bias[output]).x;
#pragma unroll
            for (int j = 0; j < 2 * TOKENS; ++j) {
                const int token = j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2;
                if (token >= item.num_rows) continue;
                float value = sums[i][j / 2][2 * half + j % 2] + own;
                if (GATED) value = swiglu(p, value, sums[i][j / 2][2 + j % 2] + of_up);
                const u64 to = GATED ? item.first + token : p.order[item.first + token];
                p.output[to * p.features + output] = static_cast<u16>(pack(value, 0.0f));
            }
        }
}

// stage: the next one of the ring, which is filled.
template <int TOKENS>
__device__ inline void finish(const Item& item, Stream& stream, u32& stage) {
    const int first = threadIdx.x / 32 * 16 * GROUPS, lane = threadIdx.x % 32, row = lane / 4;
    Sums<TOKENS> sums;
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
        asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 2) : "memory");
        __syncthreads();
        stream.fetch();  // into the stage of the previous step, which all warps have read
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            if (block > 0 && step * BLOCKS + block >= IN_BLOCKS) break;
            const int place = code_place(lane % 8, block * CODE_BYTES / 16 + lane / 8);
            const u32 words_at = stage + STAGE_CODES + ((first + row) * BLOCKS + block) * 4;
            const u32 tokens = stage + STAGE_CODES + STAGE_WORDS + block * 256 + lane % 4 * 8;
            u32 tokens_at[4];
            for (int i = 0; i < 4; ++i)
                tokens_at[i] = tokens + row * TOKEN_PIECES * 16 + (i ^ row & 3) * 32;
            sums.add(stage + (first * CODE_PIECES + place) * 16, words_at, tokens_at);
        }
        stage = next_stage(stage, stream.ring);
    }
    sums.write(stream.p, item);
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
grouped_mxfp4(const __grid_constant__ GroupedGemm p) {
    extern __shared__ uint4 shared[];
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int num_items = *p.num_blocks * p.tiles;
    u32 stage = shared_address(shared);
    Stream stream(p, stage, num_items);
#pragma unroll 1
    for (int i = 0; i < DEPTH - 1; ++i) stream.fetch();
    for (int number = blockIdx.x; number < num_items; number += gridDim.x) {
        const Item item(p, number);
        if (item.num_rows <= ROWS / 2) finish<ROWS / 16>(item, stream, stage);
        else finish<ROWS / 8>(item, stream, stage);
    }
}

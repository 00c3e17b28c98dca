// y = x W^T for a few rows of x, at the rate at which W streams from memory; small_m_gemm.py says what goes in and
// comes out. Compiled by NVRTC for compute capability 9.0 and above.
//
// The grid is persistent, one CTA a multiprocessor. A worker, which is a CTA or a cluster, takes every num_workers-th
// tile of 16 * row_groups rows of W, and each of its CTAs a share of the columns. The CTA's share of x stays in shared
// memory. A warp takes 16 rows of the tile, and shares them with those of the other column groups, in turns of
// STEP_COLUMNS. Every warp has a ring of DEPTH such steps of its own in shared memory, filled by asynchronous copies
// across tiles, so that nothing but the end of a tile waits for anybody.
//
// A norm's weight multiplies x on its way into shared memory. The division by the root mean square is left for the
// finished sums, so that nobody waits for it either.
//
// W does not depend on earlier kernels: with programmatic dependent launch its first steps are on their way while the
// kernel before this one still runs. Nothing else is touched before `griddepcontrol.wait`.
//
// The order of the columns inside a product does not matter as long as W and x have the same: a thread multiplies the 8
// neighbours of one 16-byte piece by the 8 neighbours of another, and the pieces are chosen so that no two of the 8
// threads that read together want the same banks.
//
// Defined by the compiler's options: BFLOAT16 (or float16), STEP_COLUMNS (a multiple of 64, at most 256), DEPTH.

#include "tensor_core.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int PIECE = 8;                     // the elements of a 16-byte load
constexpr int BLOCKS = STEP_COLUMNS / 64;    // of 16 rows x 64 columns, in each of which the banks are used evenly
constexpr int PIECES_A_ROW = 8, BLOCK_PIECES = 16 * PIECES_A_ROW, STEP_PIECES = BLOCKS * BLOCK_PIECES;
constexpr int LANES_A_ROW = STEP_COLUMNS / PIECE, ROWS_A_COPY = 32 / LANES_A_ROW, COPIES = 16 / ROWS_A_COPY;
constexpr int TOKENS = 8;                    // rows of x, the width of an operand of the tensor cores
constexpr int SUMS = 8 * WARPS * TOKENS;     // of a tile's pairs of rows, from all column groups

__device__ inline float widen(u16 value) { return unpack(value).x; }
__device__ inline u16 narrow(float value) { return static_cast<u16>(pack(value, 0.0f)); }

__device__ inline uint4 load_piece(const u16* source) {
    uint4 piece;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w) : "l"(source));
    return piece;
}

// Without a prefetch size for the L2 cache: with one of 256 bytes every product was slower on an H200.
__device__ inline void copy_piece(uint4* destination, const u16* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
        :: "r"(shared_address(destination)), "l"(source) : "memory");
}

__device__ inline u32 cluster_rank() { u32 rank; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank)); return rank; }

struct Product {  // small_m_gemm.py has the same
    const u16 *x, *weight, *bias, *norm_weight, *residual;
    u16* out;
    int out_features, in_features, x_stride, out_stride;
    int num_tokens, num_tiles, row_groups, splits, gated;
    float eps;

    // Rows of W: the first half of a tile's pairs, and what stands beside them: r and r + 8 of a group of 16, or a row
    // of the gate and its `up`.
    __device__ int low_row(int tile, int pair) const {
        return gated ? tile * 8 * row_groups + pair : (tile * row_groups + pair / 8) * 16 + pair % 8;
    }
    __device__ int high_row(int low) const { return gated ? out_features / 2 + low : low + 8; }

    __device__ void write(int row, int token, float value) const {
        if (row >= out_features) return;
        const u64 place = static_cast<u64>(token) * out_stride + row;
        if (residual != nullptr) value += widen(residual[place]);
        out[place] = narrow(value);
    }

    // The two rows of a pair, all columns summed.
    __device__ void finish(int low, int token, float first, float second) const {
        const int high = high_row(low);
        if (gated && low >= out_features / 2) return;
        if (bias != nullptr) {
            if (low < out_features) first += widen(bias[low]);
            if (high < out_features) second += widen(bias[high]);
        }
        if (gated) {
            write(low, token, first / (1.0f + __expf(-first)) * second);
        } else {
            write(low, token, first);
            write(high, token, second);
        }
    }
};

// What of the product is this warp's.
struct Part {
    int rank, first_tile, num_workers, group, column_group, column_groups, share, first_column, num_steps;

    __device__ Part(const Product& p, int warp) {
        rank = p.splits == 1 ? 0 : cluster_rank();
        first_tile = blockIdx.x / p.splits;
        num_workers = gridDim.x / p.splits;
        group = warp % p.row_groups;
        column_group = warp / p.row_groups;
        column_groups = WARPS / p.row_groups;
        share = p.in_features / p.splits;
        first_column = rank * share;
        num_steps = share / STEP_COLUMNS;
    }
};

// The columns [first, first + share) of x's rows into shared memory, each warp's sums of their squares beside them.
__device__ inline void stage_tokens(const Product& p, uint4* tokens, int stride, float* squares, int first, int share) {
    const bool normed = p.norm_weight != nullptr;
    float square[TOKENS] = {};
#pragma unroll 2
    for (int piece = threadIdx.x; piece < share / PIECE; piece += THREADS) {
        const u16* source = p.x + first + piece * PIECE;
        uint4 batch[TOKENS];
#pragma unroll
        for (int i = 0; i < TOKENS; ++i)
            if (i < p.num_tokens) batch[i] = load_piece(source + static_cast<u64>(i) * p.x_stride);
        uint4 weights = make_uint4(0, 0, 0, 0);
        if (normed) weights = load_piece(p.norm_weight + first + piece * PIECE);
        const u32 factors[4] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            if (i >= p.num_tokens) break;
            if (normed) {
                u32 pairs[4] = {batch[i].x, batch[i].y, batch[i].z, batch[i].w};
                for (int j = 0; j < 4; ++j) {
                    const float2 both = unpack(pairs[j]), factor = unpack(factors[j]);
                    square[i] = fmaf(both.x, both.x, fmaf(both.y, both.y, square[i]));
                    pairs[j] = pack(both.x * factor.x, both.y * factor.y);
                }
                batch[i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
            tokens[i * stride + piece] = batch[i];
        }
    }
    if (normed) {
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            if (i >= p.num_tokens) break;
            for (int distance = 16; distance > 0; distance /= 2)
                square[i] += __shfl_xor_sync(~0u, square[i], distance);
            if (threadIdx.x % 32 == 0) squares[i * WARPS + threadIdx.x / 32] = square[i];
        }
    }
    __syncthreads();
}

// Sums over a worker's shares of the columns. Each CTA finishes a run of every tile's pairs: all send it their sums of
// them, and it adds them in a fixed order one tile later, when they have surely come.
struct WorkerSum {
    const Product& p;
    const Part& part;
    float* received;  // [2][senders][2][run][TOKENS]; the first index is the parity of the tile
    float* squares;   // [splits][TOKENS], of the CTAs' shares of the columns
    int run;

    __device__ int senders() const { return p.splits * part.column_groups; }
    __device__ float* place(int parity, int sender, int high, int pair) const {
        return received + (((parity * senders() + sender) * 2 + high) * run + pair % run) * TOKENS;
    }
    __device__ u32 at(const float* place, int rank) const { return of_rank(place, p.splits == 1 ? cluster_rank() : rank); }
    __device__ void arrive() const { if (p.splits > 1) cluster_arrive(); }
    __device__ void wait() const {
        if (p.splits > 1) cluster_wait();
        else __syncthreads();
    }
    __device__ void send(int parity, int pair, int token, const float (&sum)[4]) const {
#pragma unroll
        for (int high = 0; high < 2; ++high) {
            const float* mine = place(parity, part.rank * part.column_groups + part.column_group, high, pair) + token;
            asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};"
                :: "r"(at(mine, pair / run)), "f"(sum[2 * high]), "f"(sum[2 * high + 1]) : "memory");
        }
    }
    __device__ void send_squares(const float* of_warps) const {
        for (int i = threadIdx.x; i < p.num_tokens * p.splits; i += THREADS) {
            const int token = i % p.num_tokens;
            float sum = 0.0f;
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) sum += of_warps[token * WARPS + warp];
            asm volatile("st.shared::cluster.f32 [%0], %1;"
                :: "r"(at(squares + part.rank * TOKENS + token, i / p.num_tokens)), "f"(sum) : "memory");
        }
    }
    __device__ void finish(int tile, int parity) const {
#pragma unroll 1
        for (int i = threadIdx.x; i < run * p.num_tokens; i += THREADS) {
            const int pair = part.rank * run + i % run, token = i / run;
            float low = 0.0f, high = 0.0f;
#pragma unroll 2
            for (int sender = 0; sender < senders(); ++sender) {
                low += place(parity, sender, 0, pair)[token];
                high += place(parity, sender, 1, pair)[token];
            }
            if (p.norm_weight != nullptr) {
                float square = 0.0f;
                for (int from = 0; from < p.splits; ++from) square += squares[from * TOKENS + token];
                const float scale = rsqrtf(square / p.in_features + p.eps);
                low *= scale;
                high *= scale;
            }
            p.finish(p.low_row(tile, pair), token, low, high);
        }
    }
};

// The steps of one warp, across tiles: 16 rows x STEP_COLUMNS each, into its ring.
struct Stream {
    const Product& p;
    const Part& part;
    uint4* ring;  // [DEPTH][BLOCKS][16][8] pieces; piece c of row r is at c ^ (r % 8)
    int lane, tile, step;
    const u16* rows[COPIES];

    __device__ void point() {
        const int last = (p.gated ? p.out_features / 2 : p.out_features) - 1;  // beyond it: sums that nobody reads
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int row = lane / LANES_A_ROW + ROWS_A_COPY * i, low = p.low_row(tile, part.group * 8 + row % 8);
            const int place = p.gated ? (row < 8 ? min(low, last) : p.high_row(min(low, last)))
                                      : min(row < 8 ? low : p.high_row(low), last);
            const int column = part.first_column + lane % LANES_A_ROW * PIECE;
            rows[i] = p.weight + static_cast<u64>(place) * p.in_features + column;
        }
    }
    __device__ void fetch(int slot) {
        if (tile < p.num_tiles) {
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                const int row = lane / LANES_A_ROW + ROWS_A_COPY * i, block_row = lane % LANES_A_ROW / 8 * 16 + row;
                uint4* place = ring + slot * STEP_PIECES + block_row * PIECES_A_ROW + (lane % 8 ^ row % 8);
                copy_piece(place, rows[i] + step * STEP_COLUMNS);
            }
            step += part.column_groups;
            if (step >= part.num_steps) {
                step = part.column_group;
                tile += part.num_workers;
                point();
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) small_m_gemm(const __grid_constant__ Product p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    const Part part(p, warp);
    extern __shared__ uint4 shared[];
    uint4* ring = shared + warp * DEPTH * STEP_PIECES;
    float* received = reinterpret_cast<float*>(shared + WARPS * DEPTH * STEP_PIECES);
    float* squares = received + 2 * 2 * SUMS;  // of the worker's CTAs, then of warps
    uint4* tokens = reinterpret_cast<uint4*>(squares + (2 + WARPS) * TOKENS);
    const int stride = part.share / PIECE + 1;  // neighbouring tokens' pieces in neighbouring banks
    const WorkerSum sum = {p, part, received, squares, 8 * p.row_groups / p.splits};

    Stream stream = {p, part, ring, lane, part.column_group < part.num_steps ? part.first_tile : p.num_tiles,
                     part.column_group};
    stream.point();
#pragma unroll 1
    for (int slot = 0; slot < DEPTH - 1; ++slot) stream.fetch(slot);
    sum.arrive();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // Only now: what the kernels before the last one wrote is there for the next one even before it waits itself.
    asm volatile("griddepcontrol.launch_dependents;");
    stage_tokens(p, tokens, stride, squares + 2 * TOKENS, part.first_column, part.share);

    // Rows of x that are not there have sums that nobody reads.
    const uint4* token = tokens + min(row, p.num_tokens - 1) * stride;
    int slot = 0, parity = 0;
    for (int tile = part.first_tile; tile < p.num_tiles; tile += part.num_workers) {
        float sums[4] = {};
        for (int step = part.column_group; step < part.num_steps; step += part.column_groups) {
            asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 2) : "memory");
            __syncwarp();
            stream.fetch(slot == 0 ? DEPTH - 1 : slot - 1);  // the step before: all of the warp are done with it
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                const uint4* own = ring + slot * STEP_PIECES + block * BLOCK_PIECES + row * PIECES_A_ROW;
                const uint4* pieces = token + (step * BLOCKS + block) * PIECES_A_ROW + 2 * quad;
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    const int place = (2 * quad + odd) ^ row;
                    const uint4 a = own[place], b = own[8 * PIECES_A_ROW + place];
                    const uint4 c = pieces[odd];
                    const u32 low[4] = {a.x, b.x, a.y, b.y}, high[4] = {a.z, b.z, a.w, b.w};
                    multiply(sums, low, c.x, c.y);
                    multiply(sums, high, c.z, c.w);
                }
            }
            slot = slot == DEPTH - 1 ? 0 : slot + 1;
        }
        sum.wait();
        if (tile != part.first_tile) sum.finish(tile - part.num_workers, parity ^ 1);
        else if (p.norm_weight != nullptr) sum.send_squares(squares + 2 * TOKENS);
        sum.send(parity, part.group * 8 + row, 2 * quad, sums);
        sum.arrive();
        parity ^= 1;
    }
    sum.wait();
    const int rounds = (p.num_tiles - 1 - part.first_tile) / part.num_workers;
    if (part.first_tile < p.num_tiles) sum.finish(part.first_tile + rounds * part.num_workers, parity ^ 1);
}

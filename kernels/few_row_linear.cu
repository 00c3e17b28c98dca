// y = x W^T for a few rows of x, at the rate at which W streams from memory; few_row_linear.py says what goes in and
// comes out. Compiled by NVRTC for compute capability 9.0 and above, without headers.
//
// The grid is persistent: a cluster takes every num_clusters-th tile of 16 * ROW_GROUPS rows of W, and each of its CTAs,
// one a multiprocessor, a share of the columns. The CTA's share of x stays in shared memory. A warp takes 16 rows of the
// tile, and shares them with those of the other column groups, in turns of 64 columns. Every warp has a ring of DEPTH
// such steps of its own in shared memory, filled by asynchronous copies across tiles, so that nothing but the end of a
// tile waits for anybody.
//
// NORM multiplies x by the norm's weight on its way into shared memory. The division by its root mean square is left for
// the finished sums, so that nobody waits for it either.
//
// W does not depend on earlier kernels: with programmatic dependent launch its first steps are on their way while the
// kernel before this one still runs. Nothing else is touched before `griddepcontrol.wait`.
//
// The order of the columns inside a product does not matter as long as W and x have the same: a thread multiplies the 8
// neighbours of one 16-byte piece by the 8 neighbours of another, and the pieces are chosen so that no two of the 8
// threads that read together want the same banks.
//
// Defined by the compiler's options: BFLOAT16 (or float16), ROW_GROUPS, NORM, GATED, DEPTH.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

constexpr int WARPS = 8, THREADS = 32 * WARPS, COLUMN_GROUPS = WARPS / ROW_GROUPS;
constexpr int PAIRS = 8 * ROW_GROUPS;            // of rows in a tile: r and r + 8 of a group, or of the gate and of `up`
constexpr int STEP_COLUMNS = 64, PIECE = 8;      // a piece: the elements of a 16-byte load
constexpr int STEP_PIECES = 16 * STEP_COLUMNS / PIECE, PIECES_A_ROW = STEP_COLUMNS / PIECE;
constexpr int TOKENS = 8;                        // rows of x, the width of an operand of the tensor cores

__device__ inline float2 unpack(u32 pair) {
    float2 result;
#if BFLOAT16
    result.x = __uint_as_float(pair << 16);
    result.y = __uint_as_float(pair & 0xffff0000u);
#else
    asm("{ .reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(result.x), "=f"(result.y) : "r"(pair));
#endif
    return result;
}

__device__ inline u32 pack(float low, float high) {
    u32 pair;
#if BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

__device__ inline float widen(u16 value) { return unpack(value).x; }
__device__ inline u16 narrow(float value) { return static_cast<u16>(pack(value, 0.0f)); }

__device__ inline void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BFLOAT16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline uint4 load_piece(const u16* source) {
    uint4 piece;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w) : "l"(source));
    return piece;
}

__device__ inline u32 shared_address(const void* place) { return static_cast<u32>(__cvta_generic_to_shared(place)); }

__device__ inline void copy_piece(uint4* destination, const u16* source) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;"
        :: "r"(shared_address(destination)), "l"(source) : "memory");
}

__device__ inline u32 cluster_rank() { u32 rank; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank)); return rank; }
__device__ inline u32 cluster_size() { u32 size; asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size)); return size; }
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

struct Problem {
    const u16 *x, *weight, *bias, *norm_weight, *residual;
    u16* out;
    int num_tokens, out_features, in_features, x_stride, out_stride;
    float eps;

    // Rows of W: the first half of a tile's pairs, and what stands beside them.
    __device__ int low_row(int tile, int pair) const {
#if GATED
        return tile * PAIRS + pair;
#else
        return (tile * ROW_GROUPS + pair / 8) * 16 + pair % 8;
#endif
    }
    __device__ int high_row(int low) const {
#if GATED
        return out_features / 2 + low;
#else
        return low + 8;
#endif
    }

    __device__ void write(int row, int token, float value) const {
        if (row >= out_features) return;
        const u64 place = static_cast<u64>(token) * out_stride + row;
        if (residual != nullptr) value += widen(residual[place]);
        out[place] = narrow(value);
    }

    // The two rows of a pair, all columns summed.
    __device__ void finish(int low, int token, float first, float second) const {
        const int high = high_row(low);
#if GATED
        if (low >= out_features / 2) return;
#endif
        if (bias != nullptr) {
            if (low < out_features) first += widen(bias[low]);
            if (high < out_features) second += widen(bias[high]);
        }
#if GATED
        write(low, token, first / (1.0f + __expf(-first)) * second);
#else
        write(low, token, first);
        write(high, token, second);
#endif
    }
};

// The columns [first, first + share) of x's rows into shared memory, each warp's sums of their squares beside them.
__device__ inline void stage_tokens(const Problem& p, uint4* tokens, int stride, float* squares, int first, int share) {
    float square[TOKENS] = {};
#pragma unroll 2
    for (int piece = threadIdx.x; piece < share / PIECE; piece += THREADS) {
        const u16* source = p.x + first + piece * PIECE;
        uint4 batch[TOKENS];
#pragma unroll
        for (int i = 0; i < TOKENS; ++i)
            if (i < p.num_tokens) batch[i] = load_piece(source + static_cast<u64>(i) * p.x_stride);
#if NORM
        const uint4 weights = load_piece(p.norm_weight + first + piece * PIECE);
        const u32 factors[4] = {weights.x, weights.y, weights.z, weights.w};
#endif
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            if (i >= p.num_tokens) break;
#if NORM
            u32 pairs[4] = {batch[i].x, batch[i].y, batch[i].z, batch[i].w};
            for (int j = 0; j < 4; ++j) {
                const float2 both = unpack(pairs[j]), factor = unpack(factors[j]);
                square[i] = fmaf(both.x, both.x, fmaf(both.y, both.y, square[i]));
                pairs[j] = pack(both.x * factor.x, both.y * factor.y);
            }
            batch[i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
#endif
            tokens[i * stride + piece] = batch[i];
        }
    }
#if NORM
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        if (i >= p.num_tokens) break;
        for (int distance = 16; distance > 0; distance /= 2)
            square[i] += __shfl_xor_sync(~0u, square[i], distance);
        if (threadIdx.x % 32 == 0) squares[i * WARPS + threadIdx.x / 32] = square[i];
    }
#endif
    __syncthreads();
}

// Sums over a cluster's shares of the columns. Each CTA finishes a run of every tile's pairs: all send it their sums of
// them, and it adds them in a fixed order one tile later, when they have surely come.
struct ClusterSum {
    float* received;  // [2][splits * COLUMN_GROUPS][2][run][TOKENS]; the first index is the parity of the tile
    float* squares;   // [splits][TOKENS], of the CTAs' shares of the columns
    int splits, rank, run;

    __device__ float* place(int parity, int sender, int high, int pair) const {
        return received + (((parity * splits * COLUMN_GROUPS + sender) * 2 + high) * run + pair % run) * TOKENS;
    }
    __device__ void send(int parity, int column_group, int pair, int token, const float (&sum)[4]) const {
#pragma unroll
        for (int high = 0; high < 2; ++high) {
            u32 remote;
            asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote)
                : "r"(shared_address(place(parity, rank * COLUMN_GROUPS + column_group, high, pair) + token)), "r"(pair / run));
            asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};"
                :: "r"(remote), "f"(sum[2 * high]), "f"(sum[2 * high + 1]) : "memory");
        }
    }
    __device__ void send_squares(const Problem& p, const float* of_warps) const {
        for (int i = threadIdx.x; i < p.num_tokens * splits; i += THREADS) {
            const int token = i % p.num_tokens;
            float sum = 0.0f;
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) sum += of_warps[token * WARPS + warp];
            u32 remote;
            asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote)
                : "r"(shared_address(squares + rank * TOKENS + token)), "r"(i / p.num_tokens));
            asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(remote), "f"(sum) : "memory");
        }
    }
    __device__ void finish(const Problem& p, int tile, int parity) const {
#pragma unroll 1
        for (int i = threadIdx.x; i < run * p.num_tokens; i += THREADS) {
            const int pair = rank * run + i % run, token = i / run;
            float low = 0.0f, high = 0.0f;
#pragma unroll 2
            for (int sender = 0; sender < splits * COLUMN_GROUPS; ++sender) {
                low += place(parity, sender, 0, pair)[token];
                high += place(parity, sender, 1, pair)[token];
            }
#if NORM
            float square = 0.0f;
            for (int from = 0; from < splits; ++from) square += squares[from * TOKENS + token];
            const float scale = rsqrtf(square / p.in_features + p.eps);
            low *= scale;
            high *= scale;
#endif
            p.finish(p.low_row(tile, pair), token, low, high);
        }
    }
};

// The steps of one warp, across tiles: 16 rows x 64 columns each, into its ring.
struct Stream {
    const Problem& p;
    uint4* ring;  // [DEPTH][16][8] pieces; piece c of row r is at c ^ (r % 8)
    int group, column_group, lane, first_column, num_blocks, num_tiles, num_clusters;
    int tile, block;
    const u16* rows[4];

    __device__ void point() {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 8 + 4 * i, low = p.low_row(tile, group * 8 + row % 8);
#if GATED
            const int last = p.out_features / 2 - 1, place = row < 8 ? min(low, last) : p.high_row(min(low, last));
#else
            const int place = min(row < 8 ? low : p.high_row(low), p.out_features - 1);
#endif
            rows[i] = p.weight + static_cast<u64>(place) * p.in_features + first_column + lane % 8 * PIECE;
        }
    }
    __device__ void fetch(int slot) {
        if (tile < num_tiles) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = lane / 8 + 4 * i;
                uint4* place = ring + slot * STEP_PIECES + row * PIECES_A_ROW + (lane % 8 ^ row % 8);
                copy_piece(place, rows[i] + block * STEP_COLUMNS);
            }
            block += COLUMN_GROUPS;
            if (block >= num_blocks) {
                block = column_group;
                tile += num_clusters;
                point();
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) few_row_linear(
    const u16* x, const u16* weight, const u16* bias, const u16* norm_weight, const u16* residual, u16* out,
    int num_tokens, int out_features, int in_features, int x_stride, int out_stride, float eps, int num_tiles) {
    const Problem p = {x, weight, bias, norm_weight, residual, out,
                       num_tokens, out_features, in_features, x_stride, out_stride, eps};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    const int group = warp % ROW_GROUPS, column_group = warp / ROW_GROUPS;
    const int splits = cluster_size(), rank = cluster_rank();
    const int num_clusters = gridDim.x / splits, first_tile = blockIdx.x / splits;
    const int share = in_features / splits, first_column = rank * share, num_blocks = share / STEP_COLUMNS;

    extern __shared__ uint4 shared[];
    uint4* ring = shared + warp * DEPTH * STEP_PIECES;
    uint4* tokens = shared + WARPS * DEPTH * STEP_PIECES;
    const int stride = share / PIECE + 1;  // neighbouring tokens' pieces in neighbouring banks
    float* after = reinterpret_cast<float*>(tokens + num_tokens * stride);
    float* squares = after + 2 * COLUMN_GROUPS * 2 * PAIRS * TOKENS;
    const ClusterSum cluster_sum = {after, squares + WARPS * num_tokens, splits, rank, PAIRS / splits};

    Stream stream = {p, ring, group, column_group, lane, first_column, num_blocks, num_tiles, num_clusters,
                     column_group < num_blocks ? first_tile : num_tiles, column_group};
    stream.point();
#pragma unroll
    for (int slot = 0; slot < DEPTH - 1; ++slot) stream.fetch(slot);
    asm volatile("griddepcontrol.launch_dependents;");
    cluster_arrive();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    stage_tokens(p, tokens, stride, squares, first_column, share);

    // Rows of x that are not there have sums that nobody reads.
    const uint4* token = tokens + min(row, num_tokens - 1) * stride;
    int slot = 0, parity = 0;
    for (int tile = first_tile; tile < num_tiles; tile += num_clusters) {
        float sums[4] = {};
        for (int block = column_group; block < num_blocks; block += COLUMN_GROUPS) {
            asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 2) : "memory");
            __syncwarp();
            stream.fetch(slot == 0 ? DEPTH - 1 : slot - 1);  // the step before: all of the warp are done with it
            const uint4* own = ring + slot * STEP_PIECES + row * PIECES_A_ROW;
            const uint4* pieces = token + block * PIECES_A_ROW + 2 * quad;
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const int place = (2 * quad + odd) ^ row;
                const uint4 a = own[place], b = own[8 * PIECES_A_ROW + place];
                const uint4 c = pieces[odd];
                multiply(sums, a.x, b.x, a.y, b.y, c.x, c.y);
                multiply(sums, a.z, b.z, a.w, b.w, c.z, c.w);
            }
            slot = slot == DEPTH - 1 ? 0 : slot + 1;
        }
        cluster_wait();
        if (tile != first_tile) cluster_sum.finish(p, tile - num_clusters, parity ^ 1);
#if NORM
        else cluster_sum.send_squares(p, squares);
#endif
        cluster_sum.send(parity, column_group, group * 8 + row, 2 * quad, sums);
        cluster_arrive();
        parity ^= 1;
    }
    cluster_wait();
    const int last = first_tile + (num_tiles - 1 - first_tile) / num_clusters * num_clusters;
    if (first_tile < num_tiles) cluster_sum.finish(p, last, parity ^ 1);
}

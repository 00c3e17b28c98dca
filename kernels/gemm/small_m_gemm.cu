// y = x W^T for a few rows of x. Bound by reading W from memory. small_m_gemm.py describes inputs
// and outputs. Compiled by NVRTC for compute capability 9.0 and above.
//
// The grid is persistent, one CTA per multiprocessor. A worker is a CTA or a cluster of CTAs. It
// takes every num_workers-th tile of 16 * row_groups rows of W, and each of its CTAs takes a share
// of the columns. The CTA's share of x stays in shared memory. A warp takes 16 rows of the tile.
// The column groups (warps with the same rows) take steps of STEP_COLUMNS columns round-robin.
// Each warp has its own ring of DEPTH steps in shared memory, filled by asynchronous copies that
// run ahead across tiles, so warps synchronize only at the end of a tile.
//
// The norm's weight is multiplied into x on its way into shared memory. The division by the root
// mean square is applied to the finished sums, so it does not delay the start.
//
// W does not depend on earlier kernels. With programmatic dependent launch the copies of its first
// steps start while the previous kernel still runs. Nothing else is read or written before
// `griddepcontrol.wait`.
//
// The order of the columns inside a dot product does not matter as long as W and x use the same
// one. A thread multiplies the 8 adjacent elements of one 16-byte piece of W by those of x. The
// pieces are chosen so that the 8 threads that read together use different banks.
//
// W may be FP8 (E4M3) with a float32 scale for each row and each 128 columns, which are a block:
// W is converted in registers, exactly, and the sums of a block are multiplied by its rows' scales.
// The scales of a step lie in the ring next to its weights.
//
// W may also have codes of 4 bits, as int4_weights.py stores them: a byte has the codes of two
// columns that are 64 apart. A word for each row and each GROUP columns has the scale and the zero
// point, or of E2M1 a byte has the scale's exponent. A code minus its zero point is a 16-bit
// number without rounding, and so is an E2M1 number.
// All columns of one instruction belong to one group.
//
// Compiler options define BFLOAT16 (otherwise float16: x, and W of 16 bits), BITS of a number of W
// (16, 8 for FP8, or 4), GROUP (columns that share a scale; 0 for 16 bits), E2M1 (whether codes of
// 4 bits are such numbers), STEP_COLUMNS (a multiple of a block's, at most 32 pieces) and DEPTH.

#include "small_m_block.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int STEP_PIECES = BLOCKS * BLOCK_PIECES;
constexpr int STEP_SCALES = 16 * ROW_SCALES;
constexpr int LANE_SCALES = ROW_SCALES > 1 ? ROW_SCALES / 2 : 1;  // that a lane copies
constexpr int MOST_SCALES = 16 / sizeof(Scale);
constexpr int SCALE_PIECE = LANE_SCALES < MOST_SCALES ? LANE_SCALES : MOST_SCALES;  // at a time
constexpr int LANES_PER_ROW = STEP_COLUMNS / WEIGHT_PIECE, ROWS_PER_COPY = 32 / LANES_PER_ROW;
constexpr int COPIES = 16 / ROWS_PER_COPY;
constexpr int TOKENS = 8;                 // most rows of x: the n of the tensor cores' m16n8k16
constexpr int SUMS = 8 * WARPS * TOKENS;  // partial sums of a tile's row pairs, all column groups

__device__ inline float widen(u16 value) { return unpack(value).x; }
__device__ inline u16 narrow(float value) { return static_cast<u16>(pack(value, 0.0f)); }

__device__ inline uint4 load_piece(const u16* source) {
    uint4 piece;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w) : "l"(source));
    return piece;
}

// No L2 prefetch size: with `.L2::256B` every GEMM was slower on an H200.
__device__ inline void copy_piece(uint4* destination, const Weight* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
        :: "r"(shared_address(destination)), "l"(source) : "memory");
}

__device__ inline void copy_scales(Scale* destination, const Scale* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
        :: "r"(shared_address(destination)), "l"(source), "n"(sizeof(Scale) * SCALE_PIECE)
        : "memory");
}

// Same layout as _Arguments in small_m_gemm.py.
struct Gemm {
    const u16 *x, *bias, *norm_weight, *residual;
    const Weight* weight;
    const Scale* scales;
    u16* out;
    int out_features, in_features, x_stride, out_stride;
    int num_tokens, num_tiles, row_groups, splits, gated;
    float eps;

    // The two rows of W of a pair: rows r and r + 8 of a group of 16, or a row of the gate and the
    // matching row of `up`.
    __device__ int low_row(int tile, int pair) const {
        if (gated) return tile * 8 * row_groups + pair;
        return (tile * row_groups + pair / 8) * 16 + pair % 8;
    }
    __device__ int high_row(int low) const { return gated ? out_features / 2 + low : low + 8; }

    __device__ void write(int row, int token, float value) const {
        if (row >= out_features) return;
        const u64 index = static_cast<u64>(token) * out_stride + row;
        if (residual != nullptr) value += widen(residual[index]);
        out[index] = narrow(value);
    }

    // Epilogue of a pair of rows, after all columns are summed.
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

// The part of the GEMM that this warp computes.
struct Part {
    int rank, first_tile, num_workers, group, column_group, column_groups;
    int share, first_column, num_steps;

    __device__ Part(const Gemm& p, int warp) {
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

// Copies columns [first, first + share) of x into shared memory, multiplied by the norm's weight.
// Writes each warp's sums of squares to `squares`.
__device__ inline void stage_tokens(
    const Gemm& p, uint4* tokens, int stride, float* squares, int first, int share) {
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
            tokens[i * stride + place(piece)] = paired(batch[i]);
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

// Reduces the partial sums of a worker's CTAs. Each CTA owns `run` pairs of every tile. All CTAs
// send it their partial sums of these pairs. It adds them in a fixed order one tile later, after
// the barrier that guarantees their arrival.
struct WorkerSum {
    const Gemm& p;
    const Part& part;
    float* received;  // [2][senders][2][run][TOKENS]; the first index is the parity of the tile
    float* squares;   // [splits][TOKENS]: sums of squares of each CTA's share of the columns
    int run;

    __device__ int senders() const { return p.splits * part.column_groups; }
    __device__ float* partial(int parity, int sender, int high, int pair) const {
        return received + (((parity * senders() + sender) * 2 + high) * run + pair % run) * TOKENS;
    }
    __device__ u32 address(const float* local, int rank) const {
        return remote_address(local, p.splits == 1 ? cluster_rank() : rank);
    }
    __device__ void arrive() const {
        if (p.splits > 1) cluster_arrive();
    }
    __device__ void wait() const {
        if (p.splits > 1) cluster_wait();
        else __syncthreads();
    }
    __device__ void send(int parity, int pair, int token, const float (&sum)[4]) const {
#pragma unroll
        for (int high = 0; high < 2; ++high) {
            const int sender = part.rank * part.column_groups + part.column_group;
            const float* local = partial(parity, sender, high, pair) + token;
            asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};"
                :: "r"(address(local, pair / run)), "f"(sum[2 * high]), "f"(sum[2 * high + 1])
                : "memory");
        }
    }
    __device__ void send_squares(const float* of_warps) const {
        for (int i = threadIdx.x; i < p.num_tokens * p.splits; i += THREADS) {
            const int token = i % p.num_tokens;
            float sum = 0.0f;
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) sum += of_warps[token * WARPS + warp];
            const float* local = squares + part.rank * TOKENS + token;
            asm volatile("st.shared::cluster.f32 [%0], %1;"
                :: "r"(address(local, i / p.num_tokens)), "f"(sum) : "memory");
        }
    }
    __device__ void finish(int tile, int parity) const {
#pragma unroll 1
        for (int i = threadIdx.x; i < run * p.num_tokens; i += THREADS) {
            const int pair = part.rank * run + i % run, token = i / run;
            float low = 0.0f, high = 0.0f;
#pragma unroll 2
            for (int sender = 0; sender < senders(); ++sender) {
                low += partial(parity, sender, 0, pair)[token];
                high += partial(parity, sender, 1, pair)[token];
            }
            if (p.norm_weight != nullptr) {
                float square = 0.0f;
                for (int rank = 0; rank < p.splits; ++rank)
                    square += squares[rank * TOKENS + token];
                const float scale = rsqrtf(square / p.in_features + p.eps);
                low *= scale;
                high *= scale;
            }
            p.finish(p.low_row(tile, pair), token, low, high);
        }
    }
};

// Copies one warp's steps (16 rows x STEP_COLUMNS of W each) into its ring, across tiles.
struct Stream {
    const Gemm& p;
    const Part& part;
    uint4* ring;  // [DEPTH][BLOCKS][16][8] pieces; piece c of row r is stored at c ^ swizzle(r)
    Scale* scale_ring;  // [DEPTH][16][ROW_SCALES]
    int lane, tile, step;
    const Weight* rows[COPIES];
    const Scale* scale;  // of row lane % 16, in half lane / 16 of the first step

    // The row of W that is row `row` of the warp's 16. Rows past the end read the last row; their
    // sums are not written.
    __device__ u64 weight_row(int row) const {
        const int last = (p.gated ? p.out_features / 2 : p.out_features) - 1;
        const int low = p.low_row(tile, part.group * 8 + row % 8);
        if (p.gated) return row < 8 ? min(low, last) : p.high_row(min(low, last));
        return min(row < 8 ? low : p.high_row(low), last);
    }
    // Sets the pointers to the rows of the current tile.
    __device__ void point() {
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int row = lane / LANES_PER_ROW + ROWS_PER_COPY * i;
            const int column = part.first_column + lane % LANES_PER_ROW * WEIGHT_PIECE;
            rows[i] = p.weight + (weight_row(row) * p.in_features + column) / PER_WEIGHT;
        }
#if GROUP
        scale = p.scales + weight_row(lane % 16) * (p.in_features / GROUP)
            + part.first_column / GROUP + lane / 16 * LANE_SCALES;
#endif
    }
    __device__ void fetch_scales(int slot) {
        if (lane * LANE_SCALES >= STEP_SCALES) return;
        const int first = lane % 16 * ROW_SCALES + lane / 16 * LANE_SCALES;
        Scale* destination = scale_ring + slot * STEP_SCALES + first;
#pragma unroll
        for (int i = 0; i < LANE_SCALES; i += SCALE_PIECE)
            copy_scales(destination + i, scale + step * ROW_SCALES + i);
    }
    __device__ void fetch(int slot) {
        if (tile < p.num_tiles) {
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                const int row = lane / LANES_PER_ROW + ROWS_PER_COPY * i;
                const int block_row = lane % LANES_PER_ROW / 8 * 16 + row;
                uint4* piece = ring + slot * STEP_PIECES + block_row * PIECES_PER_ROW;
                const Weight* source = rows[i] + step * (STEP_COLUMNS / PER_WEIGHT);
                copy_piece(piece + (lane % 8 ^ swizzle(row)), source);
            }
            if (GROUP) fetch_scales(slot);
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

extern "C" __global__ void __launch_bounds__(THREADS, 1)
small_m_gemm(const __grid_constant__ Gemm p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    const Part part(p, warp);
    extern __shared__ uint4 shared[];
    uint4* ring = shared + warp * DEPTH * STEP_PIECES;
    Scale* scale_rings = reinterpret_cast<Scale*>(shared + WARPS * DEPTH * STEP_PIECES);
    Scale* scale_ring = scale_rings + warp * DEPTH * STEP_SCALES;
    float* received = reinterpret_cast<float*>(scale_rings + WARPS * DEPTH * STEP_SCALES);
    float* squares = received + 2 * 2 * SUMS;  // by CTA of the worker, then by warp
    uint4* tokens = reinterpret_cast<uint4*>(squares + (2 + WARPS) * TOKENS);
    const int stride = part.share / PIECE + 1;  // + 1: adjacent tokens use different banks
    const WorkerSum sum = {p, part, received, squares, 8 * p.row_groups / p.splits};

    const int begin = part.column_group < part.num_steps ? part.first_tile : p.num_tiles;
    Stream stream = {p, part, ring, scale_ring, lane, begin, part.column_group};
    stream.point();
#pragma unroll 1
    for (int slot = 0; slot < DEPTH - 1; ++slot) stream.fetch(slot);
    sum.arrive();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // After the wait, so that the next kernel may read the output of all kernels before this one
    // without waiting itself.
    asm volatile("griddepcontrol.launch_dependents;");
    stage_tokens(p, tokens, stride, squares + 2 * TOKENS, part.first_column, part.share);

    // Rows of x past num_tokens repeat the last one; their sums are not written.
    const uint4* token = tokens + min(row, p.num_tokens - 1) * stride;
    int slot = 0, parity = 0;
    for (int tile = part.first_tile; tile < p.num_tiles; tile += part.num_workers) {
        float sums[4] = {};
        for (int step = part.column_group; step < part.num_steps; step += part.column_groups) {
            asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 2) : "memory");
            __syncwarp();
            // Refill the slot of the previous step: all lanes have read it.
            stream.fetch(slot == 0 ? DEPTH - 1 : slot - 1);
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                const uint4* weights =
                    ring + slot * STEP_PIECES + block * BLOCK_PIECES + row * PIECES_PER_ROW;
                const uint4* pieces = token + (step * BLOCKS + block) * TOKEN_PIECES + 2 * quad;
                const Scale* scales = scale_ring + slot * STEP_SCALES + row * ROW_SCALES
                    + block * (ROW_SCALES / BLOCKS);
                multiply_block(sums, weights, pieces, quad, swizzle(row), scales);
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
    if (part.first_tile < p.num_tiles)
        sum.finish(part.first_tile + rounds * part.num_workers, parity ^ 1);
}
